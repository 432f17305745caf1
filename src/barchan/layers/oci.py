"""An OCI image becomes a stack of layers in the store, one for each of its own.

Phases, as errors name them: *resolve* finds the image in what was given, *pull* reads a blob and checks it against its
digest, *convert* makes a layer of it. A layer whose content is known from another image is not read again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from barchan.errors import InvalidRequest
from barchan.kernel import directories
from barchan.layers import changeset, compression, content, erofs, lower, stack
from barchan.layers.catalog import NameEntry
from barchan.layers.content import Format
from barchan.layers.conversions import Conversion, Conversions
from barchan.layers.oci_blobs import Parts, verified
from barchan.layers.oci_schema import wrong
from barchan.layers.oci_select import Image, LayerPart
from barchan.layers.store import LayerStore, StackFile
from barchan.spec import MIB


class Step(NamedTuple):
    """Of an import: `phase` of layer number `layer`."""

    phase: Literal["pull", "convert"]
    layer: int
    layers: int
    done: int
    """Bytes of blobs that are here or not needed."""
    total: int
    """0 when the image does not say how large they are."""
    text: str
    """For people."""


Progress = Callable[[Step], None]


def import_image(
    store: LayerStore,
    parts: Parts,
    image: Image,
    name: str,
    *,
    source: str,
    kind: str,
    progress: Progress,
    manifest: str = "",
    format: Format = "split",
) -> NameEntry:
    """Give the image the next version of `name`; the same image again is no new version.

    `manifest`: its digest at the registry it comes from. `format` is that of layers which are new here.

    Raises `InvalidRequest` naming the blob or the member at fault, `NodeStorageFull`, `FeatureMissing`; the store is then
    as it was.
    """
    with store.temporary() as work:
        conversion = _Conversion(store, parts, work, _Course(image.layers, progress), format)
        for part in image.layers:
            conversion.add(part)
        layers = tuple(conversion.digests())
        if len(layers) > stack.MOST:
            raise wrong(f"the image has {len(layers)} layers, at most {stack.MOST}", "flatten it, or squash layers")
        document = StackFile(layers=layers, config=image.config)
        entry = store.add_stack(conversion.made, document, name, source=source, kind=kind, manifest=manifest)
        conversion.record()
        return entry


class _Course:
    """Where an import is, for whoever wants to know."""

    def __init__(self, layers: Sequence[LayerPart], progress: Progress) -> None:
        self._sizes = [layer.blob.size if layer.blob else 0 for layer in layers]
        self._at, self._done, self._progress = 0, 0, progress

    def begin(self) -> None:
        """The next layer."""
        self._at += 1

    def have(self) -> None:
        """What it is made of is here."""
        self._done += self._sizes[self._at - 1]

    def tell(self, phase: Literal["pull", "convert"], text: str) -> None:
        layers = len(self._sizes)
        text = f"layer {self._at} of {layers}: {text}"
        self._progress(Step(phase, self._at, layers, self._done, sum(self._sizes), text))


class _Conversion:
    """Layers from the bottom up. What is new lies in `work` until the whole image is there."""

    def __init__(self, store: LayerStore, parts: Parts, work: Path, course: _Course, format: Format) -> None:
        self._store, self._known = store, Conversions(store)
        self._parts, self._work, self._course, self._format = parts, work, course, format
        self._done: list[Conversion] = []
        self.made: dict[str, Path] = {}

    def add(self, part: LayerPart) -> None:
        self._course.begin()
        with lower.mounted(self._below()) as below:
            found = next((one for one in self._candidates(part.diff_id) if below.gives(one.facts)), None)
            if found is None:
                found = self._convert(part, below)
            else:
                self._course.have()
                self._course.tell("convert", f"known, {part.diff_id}")
        self._done = [found] if found.bottom else [*self._done, found]

    def _candidates(self, diff_id: str) -> list[Conversion]:
        return [*(one for one in self._done if one.diff_id == diff_id), *self._known.of(diff_id)]

    def _below(self) -> tuple[Path, ...]:
        return tuple(self.made.get(d) or self._store.layer_path(d) for d in reversed(self.digests()))

    def digests(self) -> list[str]:
        """Bottom first. Of two equal layers the upper one covers all that the lower one could show."""
        return list(dict.fromkeys(one.layer for one in reversed(self._done)))[::-1]

    def _convert(self, part: LayerPart, below: lower.Lower) -> Conversion:
        with self._store.temporary() as work:
            archive, tree, layer = work / "tar", work / "tree", work / "layer"
            self._pull(part, archive)
            self._course.have()
            self._course.tell("convert", f"converting {archive.stat().st_size / MIB:.1f} MiB")
            directories.make(tree, 0o755)
            bottom = changeset.apply(archive, tree, below, f"layer {part.diff_id}")
            archive.unlink()
            erofs.build(tree, layer, exact=True, format=self._format)
            digest = content.read(layer).digest
            self.made[digest] = layer.rename(self._work / digest)
        facts = tuple(below.facts.values())
        return Conversion(diff_id=part.diff_id, layer=digest, facts=facts, bottom=bottom)

    def _pull(self, part: LayerPart, archive: Path) -> None:
        """The uncompressed tar, once blob and content are what their digests say."""
        algorithm, _, wanted = part.diff_id.partition(":")
        name = part.blob.digest if part.blob else part.name
        self._course.tell("pull", f"reading {name}")
        if part.blob is None:
            with self._parts.open(part.name) as file:
                found = compression.unpack(file, archive, f"layer {name!r}", algorithm)
        else:
            with verified(self._parts, part.blob) as file:
                found = compression.unpack(file, archive, f"blob {name}", algorithm)
        if found != wanted:
            raise InvalidRequest(
                f"layer {name} is not the one that its image means: its content hashes to {found}, not {wanted}",
                field="source",
                phase="pull",
            )

    def record(self) -> None:
        for conversion in self._done:
            self._known.note(conversion)

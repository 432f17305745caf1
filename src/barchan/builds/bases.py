"""What FROM and COPY --from name: environments of the server, else images of registries, which it fetches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from barchan.builds.report import Report
from barchan.builds.steps import OfImage, Origin
from barchan.errors import EnvironmentNotFound, InvalidRequest
from barchan.image_refs import SCHEME, is_image, parse_image
from barchan.locks import LockedImage
from barchan.names import DIGEST, SCRATCH

if TYPE_CHECKING:
    from barchan.sdk import Client

T = TypeVar("T")


class Bases:
    """Each is asked for once in a build, so that all steps mean the same by a name."""

    def __init__(self, client: Client, report: Report) -> None:
        self._client, self._report = client, report
        self._known: dict[str, LockedImage] = {}

    async def of(self, origin: Origin | None) -> LockedImage:
        """None is nothing at all. Raises `InvalidRequest`, `EnvironmentNotFound` and what fetching an image may raise."""
        name = origin.name if isinstance(origin, OfImage) else SCRATCH
        if name not in self._known:
            self._known[name] = await self._found(name)
        return self._known[name]

    async def _found(self, name: str) -> LockedImage:
        """An environment of that name goes before an image; a name that no image can have is an environment's."""
        try:
            return (await self._client.lock(name)).base
        except (EnvironmentNotFound, InvalidRequest) as unknown:
            image = name if is_image(name) else SCHEME + name
            if DIGEST.fullmatch(name):
                raise
            try:
                parse_image(image)
            except InvalidRequest:
                raise unknown from None
        try:
            return (await self._client.lock(image)).base
        except EnvironmentNotFound:
            self._report.note(f"fetching {image}")
            return (await self._client.lock((await self._client.pull(image, again=False)).reference)).base

    @staticmethod
    async def aside(work: Callable[..., T], *args: object) -> T:
        """What reads the disk, beside the event loop."""
        return await asyncio.to_thread(work, *args)

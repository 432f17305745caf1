"""Several layers become one that shows the same on top of the same layers below.

What hides something below stays: a whiteout, a directory that is opaque or stands in place of something that was none. What hid only
something among the layers that are merged goes. Whether there is something below is asked of `Lower`, which keeps a record of the
answers: the merged layer is right wherever they are the same.
"""

from __future__ import annotations

from barchan.layers.layer_tree import LayerTree
from barchan.layers.lower import Lower
from barchan.layers.view import Entry, View

PHASE = "collapse"


class Merge:
    """One use. `group` shows the layers with what they remove; `target` is an empty directory, `room` in bytes."""

    def __init__(self, group: View, below: Lower, target: int, room: int) -> None:
        assert group.whiteouts
        self._group, self._below = group, below
        self._tree = LayerTree(target, room, phase=PHASE, field="environment")

    def run(self) -> None:
        """Raises what `LayerTree` does."""
        root = self._group.root()
        assert root.folder is not None
        self._tree.root(self._group.attributes(root))
        for entry in self._group.walk(root.folder):
            with self._tree.opened(entry.path[:-1]) as out:
                self._place(entry, out)
        self._tree.finish()

    def _place(self, entry: Entry, out: int) -> None:
        if entry.whiteout:
            if self._shows_below(entry):
                self._tree.removal(entry.path, out, entry.state.st_mtime_ns)
        elif entry.folder is not None:
            opaque = entry.folder.opaque and self._shows_below(entry)
            self._tree.mkdir(entry.path, out, self._group.attributes(entry), opaque=opaque)
        elif not self._tree.linked(entry.path, (entry.layer, entry.state.st_ino), entry.state, out):
            attributes = self._group.attributes(entry)
            with self._group.parent(entry) as fd:
                self._tree.copy(entry.path, fd, entry.path[-1], out, entry.state, attributes)

    def _shows_below(self, entry: Entry) -> bool:
        return not entry.covered and self._below.look(entry.path).kind != "absent"

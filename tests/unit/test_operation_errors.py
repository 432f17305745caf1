"""What the guest says of a failed file operation becomes what the caller is told."""

from __future__ import annotations

import errno

import pytest

from barchan.node.operation import file_error


@pytest.mark.parametrize(
    ("code", "step", "error", "told"),
    [
        (errno.ENOENT, "user", "user_not_found", "no user 'who'"),
        (errno.EACCES, "user", "user_not_found", "no user 'who'"),
        *((code, step, "sandbox_unavailable", "")
          for code in (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
          for step in ("user", "open", "read", "list")),
        (errno.ENOENT, "open", "file_missing", "/a/b"),
        (errno.ENOSPC, "write", "sandbox_disk_full", "/a/b"),
        (errno.EINVAL, "open", "file_failure", "not a regular file"),
        (errno.ELOOP, "open", "file_failure", "not a regular file"),
        (errno.ELOOP, "depth", "file_failure", "nested too deeply"),
        (errno.EAGAIN, "open", "file_failure", "holds a lease"),
    ],
)  # fmt: skip
def test_file_error(code: int, step: str, error: str, told: str) -> None:
    failure = file_error(code, step, b"/a/b", "who")
    assert (failure.code, failure.phase) == (error, step if error != "user_not_found" else "")
    assert told in failure.message


def test_the_hint_of_a_shortage_says_which() -> None:
    assert "fs.file-max" in file_error(errno.ENFILE, "user", b"/a", "").hint

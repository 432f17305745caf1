"""What of a directory is copied: sources, wildcards, what is ignored; and that nothing outside it is ever read."""

from __future__ import annotations

import os
import shutil
import socket
import time
from pathlib import Path

import pytest

from barchan.builds import context as module
from barchan.builds.context import NOTHING_IGNORED, LocalContext, read_ignore
from barchan.builds.patterns import compiled, is_wild
from barchan.errors import FileFailure, InvalidRequest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "context"
    for name in ("a.txt", "b.txt", ".hidden", "src/main.c", "src/deep/x.o", "src/deep/x.c", "doc/a.md"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "secret").write_text("secret")
    return root


def found(root: Path, source: str, *exclude: str, ignore: str = "") -> dict[str, list[str]]:
    """Paths in each source."""
    (root / ".dockerignore").write_text(ignore)
    sources = LocalContext(root, read_ignore(root, None)).find(source, exclude)
    return {one.name + ("/" if one.directory else ""): [item.path for item in one.items] for one in sources}


# --- patterns of names, as Go's filepath.Match has them: a part of its own table


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("*", "abc", True),
        ("*c", "abc", True),
        ("a*", "abc", True),
        ("a*/b", "a/c/b", False),
        ("a*b*c*d*e*", "axbxcxdxexxx", True),
        ("ab[c]", "abc", True),
        ("ab[b-d]", "abc", True),
        ("ab[e-g]", "abc", False),
        ("ab[^c]", "abc", False),
        ("ab[^e-g]", "abc", True),
        (r"a\*b", "a*b", True),
        (r"a\*b", "ab", False),
        ("a?b", "a☺b", True),
        ("a[^a]b", "a☺b", True),
        ("a???b", "a☺b", False),
        ("[a-ζ]*", "α", True),
        (r"[\]a]", "]", True),
        (r"[\-]", "-", True),
        (r"[x\-]", "z", False),
        ("*x", "xxx", True),
        ("a.c", "abc", False),
        ("*", ".hidden", True),
    ],
)
def test_names(pattern: str, name: str, matches: bool) -> None:
    assert bool(compiled(pattern).fullmatch(name)) == matches


@pytest.mark.parametrize(
    "pattern", ["[]a]", "[-]", "[x-]", "[-x]", r"[\-", "[a-b-c]", "[", "[^", "[^bc", "a[", "a\\", "[z-a]"]
)
def test_what_is_no_pattern(pattern: str) -> None:
    assert is_wild(pattern)
    with pytest.raises(ValueError, match="bracket|backslash|range"):
        compiled(pattern)


# --- sources


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a.txt", {"a.txt": [""]}),
        ("./a.txt", {"a.txt": [""]}),
        ("src", {"src/": ["deep", "deep/x.c", "deep/x.o", "main.c"]}),
        ("src/deep", {"deep/": ["x.c", "x.o"]}),
        ("*.txt", {"a.txt": [""], "b.txt": [""]}),
        ("[ab].txt", {"a.txt": [""], "b.txt": [""]}),
        ("*/*.md", {"a.md": [""]}),
        ("s*/deep/*.c", {"x.c": [""]}),
        ("s*", {"src/": ["deep", "deep/x.c", "deep/x.o", "main.c"]}),
        ("none*", {}),
        ("none/*", {}),
    ],
)
def test_sources(root: Path, source: str, expected: dict[str, list[str]]) -> None:
    assert found(root, source) == expected


def test_everything(root: Path) -> None:
    assert found(root, ".")["./"] == [
        *(".dockerignore", ".hidden", "a.txt", "b.txt", "doc", "doc/a.md"),
        *("src", "src/deep", "src/deep/x.c", "src/deep/x.o", "src/main.c"),
    ]


def test_a_source_without_wildcards_must_be_there(root: Path) -> None:
    with pytest.raises(FileNotFoundError):
        found(root, "none")
    with pytest.raises(FileNotFoundError, match="excluded by"):
        found(root, "a.txt", ignore="*.txt")


def test_what_a_copy_leaves_out(root: Path) -> None:
    assert found(root, "src", "**/*.o") == {"src/": ["deep", "deep/x.c", "main.c"]}
    assert found(root, "src", "deep", "!deep/x.c") == {"src/": ["deep", "deep/x.c", "main.c"]}


# --- .dockerignore: Docker's documentation, and the tests of its pattern matcher


IGNORED = {
    "*/temp*": (["a/temp", "a/temporary.txt"], ["temp", "a/b/temp"]),
    "*/*/temp*": (["a/b/temp"], ["a/temp"]),
    "temp?": (["tempa"], ["temp", "a/tempa"]),
    "*.md\n!README.md": (["a.md"], ["README.md", "b/a.md"]),
    "*.md\n!README*.md\nREADME-secret.md": (["a.md", "README-secret.md"], ["README-x.md"]),
    "*.md\nREADME-secret.md\n!README*.md": (["a.md"], ["README-secret.md"]),
    "**/*.go": (["a.go", "a/b/c.go"], ["a.gone"]),
    "**": (["a", "a/b"], []),
    "**/": (["a", "a/b"], []),
    "dir/**": (["dir/a", "dir/a/b"], ["dir", "other/a"]),
    "**/dir": (["dir", "a/dir", "a/dir/b"], ["dir2"]),
    "a/**/b": (["a/b", "a/x/b", "a/x/y/b"], ["a/x/c"]),
    "/a": (["a", "a/b"], ["b/a"]),
    "a/": (["a", "a/b"], ["b/a"]),
    "./a": (["a"], []),
    "a/../b": (["b"], ["a"]),
    "  a  ": (["a"], []),
    "# a\n#b\nc": (["c"], ["# a", "a", "#b"]),
    "a\r\nb\r\n": (["a", "b"], []),
    "\ufeffa": (["a"], []),
    "dir\n!dir/keep": (["dir/a"], ["dir/keep"]),
    "*\n!src\nsrc/deep": (["a.txt", "src/deep/x.c"], ["src/main.c"]),
    "[a-b]x": (["ax", "bx"], ["cx"]),
    r"a\*b": (["a*b"], ["axb"]),
    "a.b": (["a.b"], ["axb"]),
    "(a)+": (["(a)+"], ["aa"]),
    "! a": ([], ["a"]),
}


@pytest.mark.parametrize("text", IGNORED)
def test_what_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / ".dockerignore").write_bytes(text.encode())
    matcher = read_ignore(tmp_path, None)
    ignored, kept = IGNORED[text]
    assert [path for path in (*ignored, *kept) if matcher.matches(path)] == ignored


def test_a_file_beside_the_dockerfile_goes_first(root: Path) -> None:
    (root / ".dockerignore").write_text("*")
    (root / "Other.dockerignore").write_text("a.txt")
    assert read_ignore(root, root / "Other").matches("b.txt") is False
    assert read_ignore(root, root / "Dockerfile").matches("b.txt") is True
    shutil.rmtree(root)
    assert read_ignore(root, None) is NOTHING_IGNORED


@pytest.mark.parametrize("text", ["[", "a\n!", "a[b-"])
def test_what_cannot_be_read_is_refused_by_the_files_name(tmp_path: Path, text: str) -> None:
    (tmp_path / ".dockerignore").write_text(text)
    with pytest.raises(InvalidRequest, match=r"^\.dockerignore: "):
        read_ignore(tmp_path, None)


def test_what_is_ignored_is_not_found(root: Path) -> None:
    assert found(root, "src", ignore="**/*.o\n") == {"src/": ["deep", "deep/x.c", "main.c"]}
    assert found(root, "*.txt", ignore="a.*") == {"b.txt": [""]}
    assert found(root, "src", ignore="*\n!src/deep/x.c") == {"src/": ["deep", "deep/x.c"]}
    assert found(root, ".", ignore="*\n!doc") == {"./": ["doc", "doc/a.md"]}


# --- links, and what is no file


@pytest.mark.parametrize("target", ["../secret", "/etc/passwd", "src/../../secret", "out/secret"])
def test_no_link_leads_out(root: Path, target: str) -> None:
    (root / "out").symlink_to("..")
    (root / "link").symlink_to(target)
    for source in ("link", "lin*"):
        with pytest.raises(InvalidRequest, match="out of the context"):
            found(root, source)


def test_links_in_a_path_are_followed_inside(root: Path) -> None:
    (root / "to").symlink_to("src/deep")
    (root / "file").symlink_to("./to/../main.c")
    assert found(root, "to") == {"to/": ["x.c", "x.o"]}
    assert found(root, "to/x.c") == {"x.c": [""]}
    (source,) = LocalContext(root).find("file")
    assert source.name == "file" and Path(source.items[0].local).read_text() == "src/main.c"
    (root / "round").symlink_to("round")
    with pytest.raises(InvalidRequest, match="too many links"):
        found(root, "round")


def test_links_in_a_tree_are_copied_as_links(root: Path) -> None:
    (root / "src/out").symlink_to("../../secret")
    (root / "src/gone").symlink_to("nowhere")
    (source,) = LocalContext(root).find("src")
    links = {item.path: item.content for item in source.items if item.kind == "l"}
    assert links == {"out": "../../secret", "gone": "nowhere"}


def test_what_is_no_file_is_left_aside(root: Path) -> None:
    os.mkfifo(root / "src/pipe")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(root / "src/socket"))
        context = LocalContext(root)
        context.find("src")
    assert context.skipped == ["src/pipe", "src/socket"]
    with pytest.raises(FileFailure, match="no file, directory or link"):
        context.find("src/pipe")


def test_too_much_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_FILES", 4)
    assert len(LocalContext(root).find("src")[0].items) == 4
    (root / "src/more").touch()
    with pytest.raises(InvalidRequest, match="more than 4 files"):
        LocalContext(root).find("src")


# --- what the cache goes by


def documents(root: Path, *sources: str) -> list[object]:
    context = LocalContext(root)
    return [one.document for source in sources for one in context.find(source)]


def test_a_clone_elsewhere_is_the_same(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "other/name", symlinks=True)
    for path in (tmp_path / "other/name").rglob("*"):
        os.utime(path, (1, time.time() + 1e6))
    (tmp_path / "other/name").chmod(0o700)
    assert documents(root, ".", "a.txt") == documents(tmp_path / "other/name", ".", "a.txt")


CHANGES = {
    "content": lambda root: (root / "src/main.c").write_text("src/main.C"),
    "mode": lambda root: (root / "src/main.c").chmod(0o600),
    "mode of a directory": lambda root: (root / "src/deep").chmod(0o700),
    "name": lambda root: (root / "src/main.c").rename(root / "src/main.h"),
    "another": lambda root: (root / "src/new").touch(),
    "one less": lambda root: (root / "src/main.c").unlink(),
    "a link": lambda root: (root / "src/link").symlink_to("main.c"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_is_copied_makes_a_difference(root: Path, what: str) -> None:
    before = documents(root, "src")
    CHANGES[what](root)
    assert documents(root, "src") != before

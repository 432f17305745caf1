"""What a Dockerfile says: which stages there are, which are needed, what each step is. Cases from Docker's own documentation."""

from __future__ import annotations

from typing import Any

import pytest

from barchan.builds.dockerfile import MOST_BYTES, parse
from barchan.builds.plan import DEFAULT_PATH, plan, unused
from barchan.builds.stages import Outline, outline
from barchan.builds.steps import Context, Copy, Inline, MakeDirectory, OfImage, OfStage, Run, Stage
from barchan.builds.support import IGNORED, INSTRUCTIONS
from barchan.errors import InvalidRequest
from barchan.images import NO_CONFIG, ImageConfig


def outlined(text: str, target: str = "", **build_args: str) -> Outline:
    return outline(parse(text.encode()), build_args, target)


def planned(text: str, base: ImageConfig = NO_CONFIG, **build_args: str) -> Stage:
    """The target."""
    found = outlined(text, "", **build_args)
    return plan(found, found.stages[found.needed[-1]], base, build_args)


def refused(text: str, base: ImageConfig = NO_CONFIG) -> str:
    """What is said of it; the whole of it is planned."""
    with pytest.raises(InvalidRequest) as caught:
        found = outlined(text)
        for stage in found.stages:
            plan(found, stage, base, {})
    assert caught.value.field == "dockerfile"
    return str(caught.value)


def runs(text: str, **build_args: str) -> list[Run]:
    return [step for step in planned(text, **build_args).steps if isinstance(step, Run)]


def copies(text: str, base: ImageConfig = NO_CONFIG, **build_args: str) -> list[Copy]:
    return [step for step in planned(text, base, **build_args).steps if isinstance(step, Copy)]


# --- what is refused, and where


REFUSED = {
    "RUN --mount=type=cache,target=/x make": "--mount is not supported",
    "RUN --security=insecure make": "--security is not supported",
    "RUN --network=host make": "--network=host",
    "RUN --nonsense make": "--nonsense is no option",
    "RUN --network=none --network=none make": "given twice",
    "RUN": "needs an argument",
    "COPY --parents a b": "--parents is not supported",
    "COPY --checksum=sha256:0 a b": "--checksum is no option",
    "COPY --chmod=u+x a b": "not octal",
    "COPY --chmod=7777777 a b": "not octal",
    "COPY --exclude=[ a b": "--exclude",
    "COPY --from a b c": "--from needs a value",
    "COPY --from=$S a b": "cannot hold variables",
    "COPY --from=1 a b": "no earlier stage",
    "COPY --from=scratch a b": "nothing in it",
    "COPY ../a b": "outside the context",
    "COPY a/../../b c": "outside the context",
    "COPY a b c": "end 'c' with a slash",
    "COPY a": "needs a source and a destination",
    "COPY a <<E\nE": "cannot be the destination",
    "COPY <<a/b /x\na/b": "cannot be the name",
    "COPY https://example.com/x /x": "not in the context",
    "ADD https://example.com/x /x": "not in the context",
    "ADD git@example.com:x/y.git /x": "not in the context",
    "ADD --checksum=sha256:0 a b": "--checksum is not supported",
    "ADD --keep-git-dir=true a b": "--keep-git-dir is not supported",
    "ONBUILD RUN make": "ONBUILD is not supported",
    "ENV a": "must have two arguments",
    "ENV a=b c": "can't find = in",
    "ENV =b": "a name is empty",
    "ENV a=${b": "missing '}'",
    "ENV a=${b:=c}": "unsupported modifier",
    "ENV a=${b?nothing}": "nothing",
    "LABEL a=${b:x}": "unsupported modifier",
    "USER $NOBODY": "is empty",
    "WORKDIR $NOWHERE": "is empty",
    "SHELL /bin/bash": "as a list",
    "RUN <<E\nnever ends": "unterminated heredoc",
    "MAKE it so": "unknown instruction",
    "FROM": "needs an argument",
    "FROM a AS": "one argument, or three",
    "FROM a AS 1x": "not a name of a stage",
    "FROM $NOTHING": "is empty",
    "FROM --platform=linux/arm64 a": "--platform=linux/arm64",
}


@pytest.mark.parametrize("instruction", REFUSED)
def test_what_cannot_be_done_is_refused_by_its_line(instruction: str) -> None:
    text = refused(f"# a comment\nFROM base\n\n{instruction}\n")
    assert text.startswith("Dockerfile:4: ") and REFUSED[instruction] in text


def test_a_line_is_counted_where_an_instruction_begins() -> None:
    text = "FROM base\nRUN one && \\\n  # why\n  two && \\\n\n  three\nRUN <<A <<B\n1\nA\n2\nB\nONBUILD RUN x\n"
    assert refused(text).startswith("Dockerfile:12: ")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no FROM"),
        ("# only a comment\n", "no FROM"),
        ("RUN make\n", "no FROM"),
        ("ARG A\nRUN make\nFROM base\n", "Dockerfile:2: RUN stands before the first FROM"),
        ("# escape=x\nFROM base\n", "Dockerfile:1: "),
    ],
)
def test_a_file_that_is_none(text: str, why: str) -> None:
    assert why in refused(text)


def test_no_text_and_too_much_of_it() -> None:
    with pytest.raises(InvalidRequest, match="UTF-8"):
        parse(b"FROM base\nRUN \xff\n")
    with pytest.raises(InvalidRequest, match="at most"):
        parse(b"#" * (MOST_BYTES + 1))


def test_every_instruction_has_a_row() -> None:
    """The parser knows as many as the table, and what is neither carried out nor ignored is refused."""
    from e2b_dockerfile_utils import syntax

    assert set(INSTRUCTIONS) == set(syntax._LINE_PARSERS)
    for name, support in INSTRUCTIONS.items():
        arguments = {"FROM": "base", "COPY": "a b", "ADD": "a b", "ENV": "a=b", "LABEL": "a=b", "SHELL": '["a"]'}
        text = f"FROM base\n{name} {arguments.get(name, 'x')}\n"
        if support.refused:
            assert "is not supported" in refused(text)
        else:
            assert bool(planned(text).notes) == (name in IGNORED)


@pytest.mark.parametrize("name", [name for name, support in INSTRUCTIONS.items() if support.flags])
def test_every_option_in_the_table_is_taken(name: str) -> None:
    values = {"chmod": "644", "platform": "linux/amd64", "network": "none", "from": "other"}
    for flag in INSTRUCTIONS[name].flags:
        arguments = {"FROM": "base", "COPY": "a b", "ADD": "a b", "HEALTHCHECK": "CMD x"}.get(name, "x")
        word = f"--{flag}" if flag in INSTRUCTIONS[name].bare else f"--{flag}={values.get(flag, 'x')}"
        planned(f"FROM base\n{name} {word} {arguments}\n")


# --- stages


def test_only_what_the_target_needs_is_built() -> None:
    text = "FROM a AS one\nFROM b AS two\nFROM one AS three\nCOPY --from=two x y\nFROM c AS four\nFROM three\n"
    assert outlined(text).needed == (0, 1, 2, 4)
    assert outlined(text, "two").needed == (1,)
    assert outlined(text, "THREE").needed == (0, 1, 2)
    assert outlined(text, "3").needed == (3,)
    with pytest.raises(InvalidRequest, match="no stage is called 'five'"):
        outlined(text, "five")


def test_what_stages_begin_with() -> None:
    text = "FROM a AS Base\nFROM base\nFROM scratch\nFROM docker.io/x/y:1 AS base\nFROM base\n"
    bases = [stage.base for stage in outlined(text).stages]
    assert bases == [OfImage("a"), OfStage(0), None, OfImage("docker.io/x/y:1"), OfStage(3)]


def test_what_copies_read() -> None:
    text = "FROM a AS one\nFROM b\nCOPY x y\nCOPY --from=ONE x y\nCOPY --from=0 x y\nCOPY --from=later x y\nFROM c AS later\n"
    found = outlined(text)
    assert [step.origin for step in plan(found, found.stages[1], NO_CONFIG, {}).steps if isinstance(step, Copy)] == [
        Context(),
        OfStage(0),
        OfStage(0),
        OfImage("later"),
    ]


def test_platforms_that_are_ours_are_fine() -> None:
    text = "FROM --platform=$BUILDPLATFORM a\nFROM --platform=linux/amd64 b\n"
    assert len(outlined(text).stages) == 2


# --- arguments and variables


@pytest.mark.parametrize(
    ("build_args", "base"),
    [
        ({}, "debian:12-slim"),
        ({"V": "13"}, "debian:13-slim"),
        ({"KIND": ""}, "debian:12"),
        ({"OTHER": "x"}, "debian:12-slim"),
    ],
)
def test_arguments_before_the_first_stage(build_args: dict[str, str], base: str) -> None:
    text = 'ARG V=12\nARG KIND="-slim"\nARG ALL=$V$KIND\nFROM debian:${ALL}\n'
    assert outlined(text, **build_args).stages[0].base == OfImage(base)


def test_an_argument_of_the_file_is_one_of_a_stage_only_where_it_is_asked_for() -> None:
    text = "ARG V=12\nFROM a\nRUN one\nARG V\nRUN two\nARG V=13\nRUN three\nARG NONE\nRUN four\n"
    assert [run.env.get("V") for run in runs(text)] == [None, "12", "13", "13"]
    assert [run.env.get("V") for run in runs(text, V="9")] == [None, "9", "9", "9"]
    assert "NONE" not in runs(text)[-1].env and runs(text, NONE="")[-1].env["NONE"] == ""


def test_arguments_end_with_their_stage_and_variables_with_it_too() -> None:
    text = "FROM a AS one\nARG X=1\nENV Y=$X\nFROM one\nRUN x\n"
    found = outlined(text)
    first = plan(found, found.stages[0], NO_CONFIG, {})
    (run,) = plan(found, found.stages[1], first.config, {}).steps
    assert isinstance(run, Run) and run.env == {"PATH": DEFAULT_PATH, "Y": "1"}


def test_what_is_said_last_counts() -> None:
    assert [run.env["A"] for run in runs("FROM b\nARG A=1\nENV A=2\nRUN x\nARG A=3\nRUN x\n")] == ["2", "3"]
    assert planned("FROM b\nENV A=2\nARG A=3\n").config.env["A"] == "2", "an argument is not the environment's"


def test_proxies_reach_every_run_and_no_key() -> None:
    (run,) = runs("FROM a\nRUN x\n", HTTP_PROXY="http://p", no_proxy="x", OTHER="y")
    assert run.hidden == {"HTTP_PROXY": "http://p", "no_proxy": "x"} and run.env == {"PATH": DEFAULT_PATH}
    (run,) = runs("FROM a\nARG HTTP_PROXY\nRUN x\n", HTTP_PROXY="http://p")
    assert not run.hidden and run.env["HTTP_PROXY"] == "http://p"


def test_arguments_that_nothing_asks_for_are_told() -> None:
    given = {"A": "", "B": "", "C": "", "https_proxy": "", "TARGETARCH": ""}
    found = outlined("ARG A\nFROM a\nARG B\n", **given)
    assert unused(found, given) == ("C",)


def test_the_platform_can_be_asked_for() -> None:
    (run,) = runs("FROM a\nARG TARGETARCH TARGETPLATFORM\nRUN x\n")
    assert (run.env["TARGETARCH"], run.env["TARGETPLATFORM"]) == ("amd64", "linux/amd64")


VARIABLES = {
    r"ENV x=$foo": "FOO",
    r"ENV x=${foo}bar": "FOObar",
    r"ENV x=${unset:-word}": "word",
    r"ENV x=${empty:-word}": "word",
    r"ENV x=${empty-word}": "",
    r"ENV x=${foo:-word}": "FOO",
    r"ENV x=${foo:+word}": "word",
    r"ENV x=${empty:+word}": "",
    r"ENV x=${unset+word}": "",
    r"ENV x=${foo:?no}": "FOO",
    r"ENV x=${unset:-${foo}}": "FOO",
    r"ENV x=\$foo": "$foo",
    r"ENV x=\${foo}": "${foo}",
    r"ENV x='$foo'": "$foo",
    r'ENV x="$foo  bar"': "FOO  bar",
    r"ENV x=a\ b": "a b",
    r"ENV x a  b": "a  b",
    r'ENV x "a b"': "a b",
    r"ENV x=$unset": "",
    r"ENV foo=new x=$foo": "FOO",
    r"ENV x=${path#*/}": "b/c.tar.gz",
    r"ENV x=${path##*/}": "c.tar.gz",
    r"ENV x=${path%.*}": "a/b/c.tar",
    r"ENV x=${path%%.*}": "a/b/c",
    r"ENV x=${path/b/X}": "a/X/c.tar.gz",
    r"ENV x=${path//a/X}": "X/b/c.tXr.gz",
}


@pytest.mark.parametrize("instruction", VARIABLES)
def test_variables(instruction: str) -> None:
    text = f"FROM a\nENV foo=FOO empty= path=a/b/c.tar.gz\n{instruction}\n"
    assert planned(text).config.env["x"] == VARIABLES[instruction]


def test_the_escape_directive() -> None:
    text = "# escape=`\nFROM a\nENV x=a` b y=\\$z\nRUN one `\n  two\nCOPY a C:\\dir\\\n"
    stage = planned(text)
    assert (stage.config.env["x"], stage.config.env["y"]) == ("a b", "\\")
    assert [step.argv[-1] for step in stage.steps if isinstance(step, Run)] == ["one   two"]


def test_variables_of_the_base_are_there() -> None:
    base = ImageConfig(env={"PATH": "/bin", "A": "1"}, workdir="/w", user="ann")
    stage = planned("FROM a\nENV PATH=/opt/bin:$PATH B=$A\nRUN x\n", base)
    (run,) = stage.steps
    assert isinstance(run, Run)
    assert run.env == {"PATH": "/opt/bin:/bin", "A": "1", "B": "1"} and (run.user, run.workdir) == ("ann", "/w")


# --- RUN


@pytest.mark.parametrize(
    ("instruction", "argv"),
    [
        ("RUN a  b", ("/bin/sh", "-c", "a  b")),
        ("RUN echo $HOME", ("/bin/sh", "-c", "echo $HOME")),
        ('RUN ["a", "$b c"]', ("a", "$b c")),
        ("RUN [ -f x ] && y", ("/bin/sh", "-c", "[ -f x ] && y")),
        ("RUN a && \\\n    b", ("/bin/sh", "-c", "a &&     b")),
        ('SHELL ["/bin/bash", "-ec"]\nRUN a', ("/bin/bash", "-ec", "a")),
        ("RUN <<E\na\n  b $c\nE", ("/bin/sh", "-c", "a\n  b $c\n")),
        ("RUN <<-E\n\ta\n\t\tb\n\tE", ("/bin/sh", "-c", "a\nb\n")),
        ('RUN <<"E"\na\nE', ("/bin/sh", "-c", "a\n")),
        ("RUN <<E python3\nprint(1)\nE", ("/bin/sh", "-c", "<<E python3\nprint(1)\nE")),
        ("RUN cat <<A >x && cat <<B >y\n1\nA\n2\nB", ("/bin/sh", "-c", "cat <<A >x && cat <<B >y\n1\nA\n2\nB")),
        ("RUN <<E\n#!/usr/bin/env -S python3 -u\nprint(1)\nE", ("/usr/bin/env", "-S python3 -u", "/dev/shm/E")),
    ],
)
def test_what_runs(instruction: str, argv: tuple[str, ...]) -> None:
    (run,) = runs(f"FROM a\n{instruction}\n")
    assert run.argv == argv


def test_a_script_is_a_file_while_it_runs() -> None:
    (run,) = runs("FROM a\nRUN <<E\n#!/bin/sh\necho\nE\n")
    assert run.script == Inline("/dev/shm/E", "#!/bin/sh\necho\n")


def test_the_network_of_a_run() -> None:
    assert [run.network for run in runs("FROM a\nRUN --network=none x\nRUN --network=default x\nRUN x\n")] == [
        False,
        True,
        True,
    ]


# --- COPY


@pytest.mark.parametrize(
    ("arguments", "sources", "target"),
    [
        ("a b", ["a"], "/w/b"),
        ("a /b", ["a"], "/b"),
        ("a b/", ["a"], "/w/b/"),
        ("a .", ["a"], "/w/"),
        ("a ./", ["a"], "/w/"),
        ("a ..", ["a"], "/"),
        ("a ../x/.", ["a"], "/x/"),
        ("a //b//c", ["a"], "/b/c"),
        (". .", ["."], "/w/"),
        ("/a /b", ["a"], "/b"),
        ("a/./b/../c d", ["a/c"], "/w/d"),
        ("a b c/", ["a", "b"], "/w/c/"),
        ("$X ${Y}/", ["x y"], "/w/yes/"),
        ('["a b", "c d"]', ["a b"], "/w/c d"),
        ('"a b" c', ["a b"], "/w/c"),
        (r"a\ b c", ["a b"], "/w/c"),
        ("*.txt dir/", ["*.txt"], "/w/dir/"),
    ],
)
def test_where_from_and_where_to(arguments: str, sources: list[str], target: str) -> None:
    (copy,) = copies(f'FROM a\nENV X="x y" Y=yes\nCOPY {arguments}\n', ImageConfig(workdir="/w"))
    assert (list(copy.sources), copy.target) == (sources, target)


def test_what_copies_get() -> None:
    text = (
        "FROM a\nARG WHO=ann\nCOPY --chown=$WHO:staff --chmod=0640 --exclude=*.o --exclude=!a.o --link a b\nCOPY a b\n"
    )
    first, second = copies(text)
    assert (first.owner, first.mode, first.exclude) == ("ann:staff", 0o640, ("*.o", "!a.o"))
    assert (second.owner, second.mode, second.exclude, second.unpack) == ("", None, (), False)


def test_add_unpacks_unless_it_is_told_not_to() -> None:
    assert [copy.unpack for copy in copies("FROM a\nADD a b\nADD --unpack=false a b\nCOPY a b\n")] == [
        True,
        False,
        False,
    ]


def test_files_that_the_dockerfile_holds() -> None:
    text = 'FROM a\nENV X=1\nCOPY <<A <<-\'B\' file <<"C" /d/\n$X "q" \\$X\nA\n\t$X\n\tB\n$X\nC\n'
    (copy,) = copies(text)
    assert copy.inline == (Inline("A", '1 "q" $X\n'), Inline("B", "$X\n"), Inline("C", "$X\n"))
    assert copy.sources == ("file",)


# --- what the environment says of itself


def said(text: str, base: ImageConfig = NO_CONFIG) -> dict[str, Any]:
    config = planned(f"FROM a\n{text}\n", base).config
    return {"user": config.user, "entrypoint": config.entrypoint, "command": config.command, "labels": config.labels}


SH = ("/bin/sh", "-c")


@pytest.mark.parametrize(
    ("text", "entrypoint", "command"),
    [
        ("CMD a b", ("base",), (*SH, "a b")),
        ('CMD ["a", "b"]', ("base",), ("a", "b")),
        ("CMD []", ("base",), ()),
        ('ENTRYPOINT ["x"]', ("x",), ()),
        ("ENTRYPOINT x y", (*SH, "x y"), ()),
        ('CMD ["a"]\nENTRYPOINT ["x"]', ("x",), ("a",)),
        ('ENTRYPOINT ["x"]\nCMD ["a"]', ("x",), ("a",)),
        ('SHELL ["/bin/bash", "-c"]\nCMD a', ("base",), ("/bin/bash", "-c", "a")),
        ("CMD one\nCMD two", ("base",), (*SH, "two")),
    ],
)
def test_command_and_entrypoint(text: str, entrypoint: tuple[str, ...], command: tuple[str, ...]) -> None:
    found = said(text, ImageConfig(entrypoint=("base",), command=("arg",)))
    assert (found["entrypoint"], found["command"]) == (entrypoint, command)


def test_labels_and_user() -> None:
    found = said('ENV V=1\nLABEL a.b="x $V" c=d\nLABEL e f g\nUSER ann:$V\n', ImageConfig(labels={"c": "0", "z": "1"}))
    assert found["labels"] == {"a.b": "x 1", "c": "d", "e": "f g", "z": "1"} and found["user"] == "ann:1"


def test_working_directories() -> None:
    stage = planned(
        "FROM a\nWORKDIR /x/../y\nWORKDIR z\nUSER ann\nWORKDIR $HOME_OF/q\nWORKDIR /\nRUN x\n",
        ImageConfig(workdir="/base"),
    )
    made = [(step.path, step.user) for step in stage.steps if isinstance(step, MakeDirectory)]
    assert made == [("/y", ""), ("/y/z", ""), ("/q", "ann")] and stage.config.workdir == "/"


def test_what_is_ignored_is_told_by_its_line() -> None:
    text = "FROM a\nEXPOSE 80\nVOLUME /data\nSTOPSIGNAL TERM\nHEALTHCHECK --interval=5s CMD x\nMAINTAINER me\n"
    assert [note.split(" is ")[0] for note in planned(text).notes] == [
        "Dockerfile:2: EXPOSE",
        "Dockerfile:3: VOLUME",
        "Dockerfile:4: STOPSIGNAL",
        "Dockerfile:5: HEALTHCHECK",
        "Dockerfile:6: MAINTAINER",
    ]

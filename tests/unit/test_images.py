"""What images say about programs, on top of each other and below what a caller says."""

from __future__ import annotations

from barchan.images import NO_CONFIG, ImageConfig, settled, stacked
from barchan.spec import EnvironmentRef, SandboxSpec

BASE = ImageConfig(
    env={"PATH": "/bin", "LANG": "C"}, user="app", workdir="/srv", entrypoint=("/e",), command=("c",), labels={"a": "1"}
)
ASKED = SandboxSpec(environment=EnvironmentRef(base="it", toolkits=("tool",)))
NOW = EnvironmentRef(base="it@3", toolkits=("tool@1",))


def test_the_upper_image_wins_where_it_says_something() -> None:
    above = ImageConfig(env={"PATH": "/opt:/bin"}, workdir="/opt", command=("d",), labels={"b": "2"})
    assert stacked((BASE, NO_CONFIG, above)) == ImageConfig(
        env={"PATH": "/opt:/bin", "LANG": "C"},
        user="app",
        workdir="/opt",
        command=("d",),
        labels={"a": "1", "b": "2"},
    )


def test_layers_that_say_nothing_change_nothing() -> None:
    assert stacked(()) == stacked((NO_CONFIG, NO_CONFIG)) == NO_CONFIG
    assert stacked((NO_CONFIG, BASE, NO_CONFIG)) == BASE


def test_a_request_that_says_nothing_gets_what_the_image_says() -> None:
    done = settled(ASKED, NOW, BASE)
    assert (done.environment, done.user, done.workdir, done.env) == (NOW, "app", "/srv", BASE.env)


def test_what_a_request_says_counts() -> None:
    asked = SandboxSpec(environment=ASKED.environment, user="root", workdir="/", env={"LANG": "de", "X": "y"})
    done = settled(asked, NOW, BASE)
    assert (done.user, done.workdir, done.env) == ("root", "/", {"PATH": "/bin", "LANG": "de", "X": "y"})


def test_without_a_word_of_either_it_is_root_at_the_top() -> None:
    done = settled(ASKED, NOW, NO_CONFIG)
    assert (done.user, done.workdir, done.env) == ("root", "/", {})

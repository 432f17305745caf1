"""What a stage does, step by step, once it is known what its base says of itself. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping

import msgspec
from e2b_dockerfile_utils import PatternMatcher, parse_heredoc

from barchan.builds.dockerfile import Instruction
from barchan.builds.stages import Outline, RawStage, origin_of
from barchan.builds.steps import Context, Copy, Inline, MakeDirectory, Run, Stage, Step
from barchan.builds.support import IGNORED
from barchan.builds.variables import PROXIES, Words
from barchan.errors import InvalidRequest
from barchan.images import ImageConfig, check_config

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEFAULT_SHELL: tuple[str, ...] = ("/bin/sh", "-c")
SCRIPTS = "/dev/shm"
"""Where a script of a heredoc lies while it runs: no layer holds what is there."""
_REMOTE = re.compile(r"(?:https?|git|ssh)://|git@|[^/]+\.git(?:#|$)")
_OCTAL = re.compile(r"[0-7]{1,4}")


def plan(found: Outline, stage: RawStage, base: ImageConfig, build_args: Mapping[str, str]) -> Stage:
    """Raises `InvalidRequest`, naming the line, for what cannot be carried out."""
    planner = _Planner(found, stage, base, build_args)
    for one in stage.body:
        planner.take(one)
    return Stage(
        index=stage.index,
        name=stage.name,
        base=stage.base,
        steps=tuple(planner.steps),
        config=planner.config,
        notes=tuple(planner.notes),
    )


class _Planner:
    """The state between two instructions of one stage."""

    def __init__(self, found: Outline, stage: RawStage, base: ImageConfig, build_args: Mapping[str, str]) -> None:
        self.steps: list[Step] = []
        self.notes: list[str] = []
        self.config = msgspec.structs.replace(base, env={"PATH": DEFAULT_PATH, **base.env})
        self._found, self._stage, self._build_args = found, stage, build_args
        self._words = Words(found.escape)
        self._env = dict(self.config.env)
        """Variables of the environment and arguments, whatever was said last."""
        self._shell = DEFAULT_SHELL
        self._has_command = False
        self._take: dict[str, Callable[[Instruction], None]] = {
            "ARG": self._arg,
            "ENV": self._variables,
            "RUN": self._run,
            "COPY": self._copy,
            "ADD": self._copy,
            "WORKDIR": self._workdir,
            "USER": self._user,
            "SHELL": self._set_shell,
            "CMD": self._command,
            "ENTRYPOINT": self._entrypoint,
            "LABEL": self._label,
        }

    def take(self, one: Instruction) -> None:
        if one.name in IGNORED:
            self.notes.append(f"{one.place}: {one.name} is ignored")
            return
        self._take[one.name](one)
        try:
            check_config(self.config)
        except InvalidRequest as error:
            raise one.refused(error.message, error.hint) from error

    # --- what changes only what is said

    def _arg(self, one: Instruction) -> None:
        for name, default in self._words.arguments(one, self._env):
            fallback = self._found.arguments.get(name) if default is None else default
            if (value := self._build_args.get(name, fallback)) is not None:
                self._env[name] = value

    def _variables(self, one: Instruction) -> None:
        pairs = dict(self._words.pairs(one, dict(self._env)))
        self._env.update(pairs)
        self._change(env={**self.config.env, **pairs})

    def _label(self, one: Instruction) -> None:
        self._change(labels={**self.config.labels, **dict(self._words.pairs(one, self._env))})

    def _user(self, one: Instruction) -> None:
        user = self._words.one(one, one.args[0], self._env)
        if not user:
            raise one.refused(f"{one.args[0]!r} is empty")
        self._change(user=user)

    def _set_shell(self, one: Instruction) -> None:
        self._shell = one.args

    def _command(self, one: Instruction) -> None:
        self._has_command = True
        self._change(command=self._command_line(one))

    def _entrypoint(self, one: Instruction) -> None:
        """A command that the base brought belongs to the base's entrypoint."""
        kept = self.config.command if self._has_command else ()
        self._change(entrypoint=self._command_line(one), command=kept)

    def _command_line(self, one: Instruction) -> tuple[str, ...]:
        return one.args if one.exec_form or not one.args else (*self._shell, *one.args)

    def _change(self, **fields: object) -> None:
        self.config = msgspec.structs.replace(self.config, **fields)

    # --- what makes layers

    def _workdir(self, one: Instruction) -> None:
        written = self._words.one(one, one.args[0], self._env)
        if not written:
            raise one.refused(f"{one.args[0]!r} is empty")
        path = _joined(self.config.workdir, written)
        self._change(workdir=path)
        if path != "/":
            self.steps.append(MakeDirectory(place=one.place, text=one.text, path=path, user=self.config.user))

    def _run(self, one: Instruction) -> None:
        network = one.flag("network") or "default"
        if network not in ("default", "none"):
            raise one.refused(f"--network={network} is not supported", "`default` or `none`")
        argv, script = self._program(one)
        hidden = {k: v for k, v in self._build_args.items() if k in PROXIES and k not in self._env}
        self.steps.append(
            Run(
                place=one.place,
                text=one.text,
                argv=argv,
                script=script,
                env=dict(self._env),
                hidden=hidden,
                user=self.config.user,
                workdir=self.config.workdir or "/",
                network=network == "default",
            )
        )

    def _program(self, one: Instruction) -> tuple[tuple[str, ...], Inline | None]:
        """What runs, and a script that it reads."""
        if one.exec_form or not one.heredocs:
            return self._command_line(one), None
        (line,), first = one.args, one.heredocs[0]
        if parse_heredoc(line) is None:
            # The shell knows heredocs itself: it gets back what the parser took away.
            documents = "".join(f"\n{document.content}{document.name}" for document in one.heredocs)
            return (*self._shell, line + documents), None
        if not first.tidy.startswith("#!"):
            return (*self._shell, first.tidy), None
        interpreter = first.tidy[2:].partition("\n")[0].strip().split(None, 1)
        if not interpreter:
            raise one.refused("its script names no interpreter after #!")
        path = f"{SCRIPTS}/{posixpath.basename(first.name) or 'script'}"
        return (*interpreter, path), Inline(path, first.tidy)

    def _copy(self, one: Instruction) -> None:
        *written, last = one.args
        documents = {document.name: document for document in one.heredocs}
        inline, sources = [], []
        for source in written:
            marker = None if one.exec_form else parse_heredoc(source)
            if marker is not None and (document := documents.get(marker.name)) is not None:
                text = self._words.document(one, document.tidy, self._env) if document.expand else document.tidy
                inline.append(Inline(_plain_name(one, document.name), text))
            else:
                sources.append(self._source(one, source))
        target = self._target(one, last)
        if len(written) > 1 and not target.endswith("/"):
            raise one.refused("several sources need a directory to go to", f"end {last!r} with a slash")
        self.steps.append(
            Copy(
                place=one.place,
                text=one.text,
                sources=tuple(sources),
                inline=tuple(inline),
                target=target,
                origin=origin_of(one, self._found.stages[: self._stage.index]) if one.name == "COPY" else Context(),
                owner=self._words.one(one, one.flag("chown"), self._env),
                mode=self._mode(one),
                exclude=_patterns(one),
                unpack=one.name == "ADD" and one.flag("unpack") != "false",
            )
        )

    def _source(self, one: Instruction, written: str) -> str:
        if _REMOTE.match(written):
            raise one.refused(f"{written} is not in the context", "fetch it in a RUN with an open network")
        source = self._words.one(one, written, self._env)
        if _REMOTE.match(source):
            raise one.refused(f"{source} is not in the context", "fetch it in a RUN with an open network")
        path = posixpath.normpath(source.lstrip("/") or ".")
        if path.split("/")[0] == "..":
            raise one.refused(f"{source!r} is outside the context")
        return path

    def _target(self, one: Instruction, written: str) -> str:
        if parse_heredoc(written) is not None:
            raise one.refused("a heredoc cannot be the destination")
        target = self._words.one(one, written, self._env)
        path = _joined(self.config.workdir, target)
        directory = target in ("", ".", "..") or target.endswith(("/", "/.", "/.."))
        return path + "/" if directory and path != "/" else path

    def _mode(self, one: Instruction) -> int | None:
        text = self._words.one(one, one.flag("chmod"), self._env)
        if not text:
            return None
        if not _OCTAL.fullmatch(text):
            raise one.refused(f"--chmod={text} is not octal", "for example --chmod=755")
        return int(text, 8)


def _joined(directory: str, path: str) -> str:
    """POSIX keeps two slashes in front; here they mean nothing."""
    return "/" + posixpath.normpath(posixpath.join(directory or "/", path)).lstrip("/")


def _plain_name(one: Instruction, name: str) -> str:
    if "/" in name or name in (".", ".."):
        raise one.refused(f"{name!r} cannot be the name of a file")
    return name


def _patterns(one: Instruction) -> tuple[str, ...]:
    patterns = one.flags.get("exclude", ())
    try:
        PatternMatcher(list(patterns))
    except ValueError as error:
        raise one.refused(f"--exclude: {error}") from error
    return patterns


def unused(found: Outline, build_args: Mapping[str, str]) -> tuple[str, ...]:
    """Build arguments that no ARG asks for."""
    words = Words(found.escape)
    asked = set(found.arguments) | PROXIES
    for stage in found.stages:
        asked |= {name for one in stage.body if one.name == "ARG" for name, _ in words.arguments(one, {})}
    return tuple(sorted(set(build_args) - asked))

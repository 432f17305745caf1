"""Variables in what a Dockerfile says. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from e2b_dockerfile_utils import ShellLex

from barchan.builds.dockerfile import Instruction

PROXIES = frozenset(
    form
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
    for form in (name, name.lower())
)
"""Build arguments that every RUN gets and no Dockerfile need declare."""


class Words:
    """Takes off quotes and escapes and puts in values, as BuildKit does; a variable that is not set is empty."""

    def __init__(self, escape: str) -> None:
        self._escape = escape

    def one(self, of: Instruction, word: str, env: Mapping[str, str]) -> str:
        """Raises `InvalidRequest` naming where it stands."""
        return self._processed(of, ShellLex(self._escape, env=env, skip_unset_env=False), word)

    def document(self, of: Instruction, text: str, env: Mapping[str, str]) -> str:
        """Of a heredoc, in which quotes are text."""
        lex = ShellLex("\\", skip_process_quotes=True, env=env, skip_unset_env=False)
        return self._processed(of, lex, text)

    def pairs(self, of: Instruction, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """What ENV and LABEL say. Values see the variables as they were before the instruction."""
        for at in range(0, len(of.args), 3):
            name = self.one(of, of.args[at], env)
            if not name:
                raise of.refused("a name is empty")
            yield name, self.one(of, of.args[at + 1], env)

    def arguments(self, of: Instruction, env: Mapping[str, str]) -> list[tuple[str, str | None]]:
        """What ARG says: names and defaults."""
        found: list[tuple[str, str | None]] = []
        for word in of.args:
            name, equals, default = word.partition("=")
            if not (name := self.one(of, name, env)):
                raise of.refused("a name is empty")
            found.append((name, self.one(of, default, env) if equals else None))
        return found

    def _processed(self, of: Instruction, lex: ShellLex, word: str) -> str:
        try:
            return lex.process_word(word)
        except ValueError as error:
            raise of.refused(str(error)) from error

"""Commands that end in another program's arguments: `run [OPTIONS] ENV [OPTIONS] [--] ARGV…`."""

from __future__ import annotations

import click


class ProgramCommand(click.Command):
    """Options stand before or after the first positional; what follows belongs to the program, `--` or not."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        valued = {name for p in self.get_params(ctx) if takes_value(p) for name in p.opts}
        before, rest = split(args, valued)
        if args[len(before) : len(before) + 1] == ["--"]:
            args = [*before, "--", *rest]  # nothing after it is ours, so that a forgotten ID or ENV is what is told
        elif rest:
            after, argv = split(rest[1:], valued)
            args = [*before, *after, "--", rest[0], *argv]
        return super().parse_args(ctx, args)


def takes_value(param: click.Parameter) -> bool:
    return isinstance(param, click.Option) and not param.is_flag and not param.count


def split(args: list[str], valued: set[str]) -> tuple[list[str], list[str]]:
    """The leading options with their values, and the rest, without the `--` between them."""
    at = 0
    while at < len(args) and args[at].startswith("-") and args[at] != "-":
        if args[at] == "--":
            return args[:at], args[at + 1 :]
        at += 2 if _wants_next(args[at], valued) else 1
    return args[:at], args[at:]


def _wants_next(option: str, valued: set[str]) -> bool:
    if option.startswith("--"):
        return option in valued  # not with `=`
    for i, letter in enumerate(option[1:], start=2):
        if f"-{letter}" in valued:
            return i == len(option)
    return False

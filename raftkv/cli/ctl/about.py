"""``raftkvctl options``, ``version`` and ``completion``."""

from __future__ import annotations

from raftkv import __version__
from raftkv.cli.exits import BAD_ARGUMENTS, CommandError
from raftkv.cli.goflags.command import Invocation

API_VERSION = "3.6"
"""Version of etcd's API that is spoken."""
SHELLS = ("bash", "zsh", "fish", "powershell")
_POWERSHELL = """Register-ArgumentCompleter -Native -CommandName %(name)s -ScriptBlock {
    param($word, $commandAst, $cursor)
    $position = $commandAst.CommandElements.Count
    if ($word) { $position -= 1 }
    $env:%(variable)s = 'bash_complete'
    $env:COMP_WORDS = $commandAst.ToString()
    $env:COMP_CWORD = $position
    try {
        %(name)s | ForEach-Object {
            $kind, $value = $_ -split ',', 2
            [System.Management.Automation.CompletionResult]::new($value, $value, 'ParameterValue', $value)
        }
    } finally {
        Remove-Item Env:%(variable)s, Env:COMP_WORDS, Env:COMP_CWORD
    }
}"""
"""PowerShell hands the words over as bash does, and understands bash's answers; click has no script for it."""


def version(invocation: Invocation) -> None:
    """Print the version of this program and of the API."""
    print(f"raftkvctl version: {__version__}")
    print(f"API version: {API_VERSION}")


def options(invocation: Invocation) -> None:
    """Describe the options that every command has."""
    import click

    from raftkv.cli.ctl.tree import GLOBAL_FLAGS
    from raftkv.cli.goflags.command import flag_row

    formatter = click.HelpFormatter(max_width=80)
    formatter.write_text("Every command of raftkvctl takes these options, before or after its name.")
    formatter.write_text("An option that is not given is taken from its environment variable.")
    formatter.write_paragraph()
    formatter.write_dl([flag_row(flag) for flag in GLOBAL_FLAGS], col_max=26)
    formatter.write_paragraph()
    formatter.write_text("A DURATION is a number with a unit: 300ms, 1.5s, 2m. A LIST is separated by commas.")
    print(formatter.getvalue(), end="")


def completion(invocation: Invocation) -> None:
    """Print the script that makes a shell complete raftkvctl's commands and flags."""
    if len(invocation.arguments) != 1:
        raise CommandError(f"accepts 1 arg(s), received {len(invocation.arguments)}")
    shell = invocation.arguments[0]
    if shell not in SHELLS:
        raise CommandError(f'unknown shell "{shell}": one of {", ".join(SHELLS)}', BAD_ARGUMENTS)
    from click import shell_completion

    from raftkv.cli.ctl import tree as ctl

    if shell == "powershell":
        print(_POWERSHELL % {"name": ctl.NAME, "variable": ctl.COMPLETION_VARIABLE})
        return
    kind = shell_completion.get_completion_class(shell)
    if kind is None:
        raise CommandError(f"no completion for {shell}")
    script = kind(ctl.make_tree(), {}, ctl.NAME, ctl.COMPLETION_VARIABLE)
    print(script.source_template % script.source_vars())

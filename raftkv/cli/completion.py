"""The scripts that make a shell complete a program's commands and flags."""

from __future__ import annotations

import click
from click import shell_completion

from raftkv.cli.exits import BAD_ARGUMENTS, CommandError

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


def print_script(tree: click.Command, name: str, variable: str, arguments: list[str]) -> None:
    """Print the completion script of a program.

    Arguments:
        tree: its commands.
        name: of the program.
        variable: the environment variable by which the shell asks it.
        arguments: of the command ``completion``: the shell.

    Raises:
        CommandError: not one argument, or an unknown shell.
    """
    if len(arguments) != 1:
        raise CommandError(f"accepts 1 arg(s), received {len(arguments)}")
    shell = arguments[0]
    if shell not in SHELLS:
        raise CommandError(f'unknown shell "{shell}": one of {", ".join(SHELLS)}', BAD_ARGUMENTS)
    if shell == "powershell":
        print(_POWERSHELL % {"name": name, "variable": variable})
        return
    kind = shell_completion.get_completion_class(shell)
    if kind is None:
        raise CommandError(f"no completion for {shell}")
    script = kind(tree, {}, name, variable)
    print(script.source_template % script.source_vars())

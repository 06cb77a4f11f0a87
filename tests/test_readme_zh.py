"""The Chinese introduction: what it tells to type and where it points exist."""

import re
import shlex

import pytest

from labkit import paths
from labkit.cli import _build_parser

TEXT = (paths.ROOT / "README.zh.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [line.partition("  #")[0].partition("    #")[0].strip() for block in BLOCKS for line in block.splitlines()]


def test_one_page():
    assert len(TEXT.splitlines()) < 80
    assert len(COMMANDS) == 12


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)]+)\)", TEXT))
def test_links_lead_somewhere(link):
    assert (paths.ROOT / link).exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exist(command):
    program, *arguments = shlex.split(command)
    if program == "make":
        makefile = (paths.ROOT / "Makefile").read_text()
        assert re.search(rf"^{arguments[0]}:", makefile, re.MULTILINE)
    else:
        assert program == "labkit"
        assert _build_parser().parse_args(arguments).command


def test_files_in_the_text_exist():
    for name in re.findall(r"notebooks/\w+\.ipynb", TEXT):
        assert (paths.ROOT / name).is_file()

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


def test_numbers_and_figures_are_those_of_the_readme():
    readme = (paths.ROOT / "README.md").read_text(encoding="utf-8")
    told = TEXT.split("## 快速上手")[0]
    assert re.findall(r"\]\((figures/\w+\.svg)\)", told) == re.findall(r"\]\((figures/\w+\.svg)\)", readme)
    number = r"\d+(?:,\d{3})*(?:\.\d+)?"
    assert set(re.findall(number, told.partition("![")[2])) - set(re.findall(number, readme)) == set()

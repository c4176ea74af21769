"""A command line that is spelled from arguments is read as these arguments again."""

import shlex

import pytest

from meshwright.cli.inspect.command import Args as InspectArgs
from meshwright.cli.main import command_module
from meshwright.cli.plan.args import Args as PlanArgs
from meshwright.cli.words.read import read_words
from meshwright.cli.words.spell import spelled

LINES = [
    "verify tiny --on cpu:8 --batch 16 --seq-len 64 --packed --freeze embedding 'layers.*' --mesh fsdp=8",
    "matmul 'A[I_X, J] @ B[J, K]' --mesh X=4 --dims I=8,J=8,K=8 --on v5e:2x2 --run",
    "collective all-gather --mesh X=4 --axis X --on v5e:2x2 --bytes 64M",
    "eval 'my runs/tiny' --data 'a b.txt' c.txt --stride 8",
    "inspect module:f --mesh dp=2 --state params moments --html 'my page.html' --check",
    "show 'A[I_X]' --mesh X=2 --dims I=8 --all",
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split()[0])
def test_a_line_is_spelled_as_it_was_typed(line):
    command, *words = shlex.split(line)
    args, _ = read_words(words, command_module(command).Args, kinds={}, hints={})
    again = shlex.split(spelled(command, args))
    assert again[:2] == ["meshwright", command]
    assert read_words(again[2:], type(args), kinds={}, hints={})[0] == args
    assert sorted(again[2:]) == sorted(words)


def test_fields_are_left_out_and_changed():
    args, _ = read_words(["m:f", "--mesh", "dp=2", "--memory", "--html", "a.html"], InspectArgs, kinds={}, hints={})
    assert (
        spelled("inspect", args, without=("memory", "html"), check=True) == "meshwright inspect m:f --mesh dp=2 --check"
    )


def test_an_option_with_a_second_name_is_spelled_once():
    args, _ = read_words(["tiny", "--on", "cpu:8", "-o", "p.yaml"], PlanArgs, kinds={}, hints={})
    assert spelled("plan", args) == "meshwright plan tiny --on cpu:8 --output p.yaml"

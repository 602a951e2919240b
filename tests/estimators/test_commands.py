"""Reading commands: what is seen in them, and that nothing in them can do harm."""

from __future__ import annotations

import random
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tenuto.estimators.commands import MAX_CHARS, read_command
from tenuto_predict import FEATURES, get_features


@pytest.mark.parametrize(
    ("command", "programs"),
    [
        ("ls", ["ls"]),
        ("cd /src && grep -rn foo . | head -5", ["cd", "grep", "head"]),
        ("git -C repo --no-pager log --oneline", ["git log"]),
        ("/usr/bin/python3.11 -m pytest -x", ["pytest"]),
        ("python3 -c 'import os; os.listdir()'", ["python", "import os"]),
        ("FOO=1 BAR='a b' env X=y timeout 20 make -j4", ["make"]),
        ("sudo apt-get -y install gcc", ["apt-get install"]),
        ("for f in *.py; do wc -l $f; done", ["wc"]),
        ("if test -f x; then cat x; else touch x; fi", ["test", "cat", "touch"]),
        ("while read line; do echo $line; done < file", ["read", "echo"]),
        ("find . -print0 | xargs -0 grep -l x", ["find", "xargs", "grep"]),
        ("echo $(ls | wc -l) `pwd`", ["echo", "ls", "wc", "pwd"]),
        ("echo 'a | b && make'", ["echo"]),
        ("cat > make << 'EOF'\nmake\npytest\nEOF\nls", ["cat", "ls"]),
        ("ls > make 2>&1; cat < pytest", ["ls", "cat"]),
        ("npm run build --prefix web", ["npm run"]),
        ("# just a comment", ["#"]),
        ("", []),
    ],
)
def test_programs_are_named_with_their_subcommand(command: str, programs: list[str]) -> None:
    assert read_command(command).programs == programs


def test_the_main_program_is_the_first_that_does_more_than_change_the_directory() -> None:
    assert read_command("cd a && cd b; pytest -x").get_main_program() == "pytest"
    assert read_command("cd a").get_main_program() == "cd"
    assert read_command("").get_main_program() == ""


def test_counts_of_a_pipeline_by_hand() -> None:
    shape = read_command(
        "cd /a/b && grep -rn 'def x' src/ --include='*.py' 2>/dev/null | sort | head -20 > out.txt"
    )
    assert shape.num_pipes == 2
    assert shape.num_sequential == 1
    assert shape.num_redirects == 2
    assert shape.num_words == 10  # the files redirected to are none
    assert shape.num_options == 3  # -rn, --include, -20
    assert shape.num_operands == 3  # /a/b, 'def x', src/
    assert (shape.num_paths, shape.max_path_depth, shape.names_whole_tree) == (2, 2, 1)
    assert (shape.is_recursive, shape.limits_output, shape.largest_number) == (1, 1, 20)


@pytest.mark.parametrize(
    ("command", "counts"),
    [
        ("for i in 1 2 3; do sleep 1.5; done; sleep 2m", {"num_loops": 1, "wait_s": 121.5}),
        ("find . -name '*.md' -exec grep -l x {} +", {"num_repeaters": 1, "is_recursive": 1}),
        ("ls *.py src/**/*.js", {"num_globs": 2, "names_whole_tree": 1}),
        ("python - << END\nprint(1)\nEND", {"code_chars": len("print(1)"), "num_redirects": 1}),
        ("python -c 'print(1)'", {"code_chars": len("'print(1)'")}),
        ("python -c 'import os, sys; from re import sub'", {"num_imports": 2}),
        ("python -c 'import time; time.sleep(2.5)'", {"wait_s": 2.5}),
        ("pytest --collect-only", {"only_asks": 1}),
        ("make -n", {"only_asks": 1}),
        ("head -n 5 x", {"limits_output": 1, "only_asks": 0}),
        ("cp -r a b", {"is_recursive": 1}),
        ("ls -la", {"is_recursive": 0}),
        ("sort -rn x | sed -r s/a/b/", {"is_recursive": 0}),
        ("rm -rf x", {"is_recursive": 1}),
        ("echo $((1 + 2)) $(date)", {"num_substitutions": 2}),
        ("sleep infinity; sleep x", {"wait_s": 1e6}),
        ("sleep -5; sleep nan", {"wait_s": 0.0}),
    ],
)
def test_what_else_is_counted(command: str, counts: dict[str, float]) -> None:
    shape = read_command(command)
    assert {name: getattr(shape, name) for name in counts} == counts


def test_kinds_of_programs() -> None:
    assert read_command("cd x && python -m pytest").runs_tests()
    assert not read_command("grep pytest setup.py").runs_tests()
    assert read_command("pip install -e .").builds_or_installs()
    assert not read_command("pip list").builds_or_installs()


@given(st.text(alphabet="ab -|&;<>()\"'`$\\\n*/.=012EOF{}", max_size=200))
def test_any_text_can_be_read(command: str) -> None:
    features = get_features(read_command(command), {"ls": -4.0}, 0.0)
    assert len(features) == len(FEATURES) == 25
    assert all(value == value and abs(value) < float("inf") for value in features)


@pytest.mark.parametrize(
    "piece", ["'", '"', "$(", "<<A\n", "a=", "\\", "<<", "-", "2>", "` ", "sleep 1e308 ", "9" * 40]
)
def test_long_hostile_text_is_read_in_linear_time(piece: str) -> None:
    rng = random.Random(1)
    for text in (piece * 100_000, "".join(rng.choice([piece, "x", "\n"]) for _ in range(100_000))):
        start_s = time.process_time()
        shape = read_command(text)
        # A quadratic reader of 2,000 characters would take seconds.
        assert time.process_time() - start_s < 1.0
        assert shape.num_chars == len(text) > MAX_CHARS


def test_programs_are_looked_up_with_their_subcommand_then_without() -> None:
    table = {"git log": -2.0, "git": -3.0, "grep": 1.0}
    names = list(FEATURES)
    main, slowest = names.index("main_program"), names.index("slowest_program")
    features = get_features(read_command("git log | grep x"), table, 0.0)
    assert (features[main], features[slowest]) == (-2.0, 1.0)
    features = get_features(read_command("git status | wc"), table, 0.5)
    assert (features[main], features[slowest]) == (-3.0, -3.0)
    features = get_features(read_command("nothing-known"), table, 0.5)
    assert (features[main], features[slowest]) == (0.5, 0.5)

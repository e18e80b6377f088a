import dataclasses

import pytest

from models.extras.options import RESOLVED, Options, parse


def test_saved_options_are_read_again(tmp_path):
    options = parse(["--steps=7", "--remat=full", "--no-digest", "--resume", "--mesh=fsdp=2"])
    assert (options.steps, options.remat, options.resume) == (7, "full", "auto")
    options.save(tmp_path)
    file = f"--config-file={tmp_path / RESOLVED}"
    assert parse([file]) == options
    # The command line says more than the file, wherever the file is named.
    assert parse(["--steps=8", file]) == dataclasses.replace(options, steps=8)
    assert parse([file, "--no-resume"]).resume == "never"


def test_cosine_ends_with_the_run_unless_it_is_told_otherwise():
    assert Options().decay_steps == 0
    assert Options(schedule="cosine", steps=50).decay_steps == 50
    assert Options(schedule="cosine", steps=50, cosine_steps=90).decay_steps == 90


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stpes: 3", "unknown option 'stpes'; known options are config, init_from, steps"),
        ("- steps", "no mapping of options to values, as `steps: 100`"),
        ("steps: 0", "--steps must be at least 1"),
        ("eval_part: 1", "--eval-part must be between 0 and 1"),
        ("{", "run.yaml: while parsing"),
    ],
)
def test_wrong_file_says_what_is_wrong(text, words, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(SystemExit):
        parse(["--config-file", str(tmp_path / "run.yaml")])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--learning-rate=-1", "--learning-rate must be finite and at least 0, not -1.0"),
        ("--weight-decay=inf", "--weight-decay must be finite and at least 0, not inf"),
        ("--max-gradient-norm=0", "--max-gradient-norm must be above 0, not 0.0"),
        ("--seed=-1", "--seed must be at least 0, not -1"),
        ("--cosine-steps=9", "--cosine-steps is of use with --schedule cosine only; give both"),
        ("--config-f=run.yaml", "unrecognized arguments: --config-f=run.yaml"),
    ],
)
def test_value_that_is_not_valid_is_refused_with_the_reason(words, error, capsys):
    with pytest.raises(SystemExit):
        parse([words])
    assert error in capsys.readouterr().err


def test_norm_without_a_limit_is_infinite():
    assert parse(["--max-gradient-norm=inf"]).max_gradient_norm == float("inf")


def test_missing_file_is_named(capsys):
    with pytest.raises(SystemExit):
        parse(["--config-file=/no/such.yaml"])
    assert "--config-file /no/such.yaml" in capsys.readouterr().err

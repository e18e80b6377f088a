"""Help texts of the command lines of models/."""

from collections.abc import Callable, Sequence

import pytest

from models import convert, generate, parity
from models.extras import options, perplexity, tokenize


@pytest.mark.parametrize(
    "command",
    [options.parse, tokenize.main, perplexity.main, generate.main, parity.parse, convert.main],
    ids=lambda command: command.__module__,
)
def test_help_gives_defaults_in_words(
    command: Callable[[Sequence[str]], object], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    module = command.__module__.replace("extras.options", "pretrain")
    assert text.startswith(f"usage: python -m {module}")
    assert "(default: None)" not in text
    assert "(default: False)" not in text
    assert "None:" not in text

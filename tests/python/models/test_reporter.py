import io
import sys

import jax.numpy as jnp
import pytest

from models.extras import reporter as module
from models.extras.reporter import Reporter, Settings
from models.train import TrainState


class Stream(io.StringIO):
    """Standard error; a terminal if `is_terminal`."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_terminal_has_a_progress_bar_and_other_streams_have_lines(
    is_terminal, tmp_path, monkeypatch
):
    plotted = []
    monkeypatch.setattr(module, "plot_losses", lambda *arguments: plotted.append(arguments[2]))
    monkeypatch.setattr(sys, "stderr", Stream(is_terminal))
    settings = Settings(
        run_dir=tmp_path,
        start=1,
        steps=3,
        log_every=2,
        tokens_per_step=8,
        digest=False,
        counters=dict,
        flops=1.0,
        peak_flops=None,
        unit="token",
    )
    reporter = Reporter(settings)
    state = TrainState(jnp.int32(0), {"a": jnp.zeros(3)}, ())
    for _ in range(2):
        if reporter.step({"loss": jnp.float32(1.25), "gradient_norm": jnp.float32(1)}):
            reporter.report(state, "raise")
    reporter.finish()
    printed = sys.stderr.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert ("step/s" in printed) == is_terminal
    assert ("| 3/3 [" in printed) == is_terminal
    assert ("loss=1.2500" in printed) == is_terminal
    assert ("step 3/3  loss 1.2500" in printed) != is_terminal
    assert "checkpoints and the plot loss.png are in" in printed
    assert plotted == ["token"]

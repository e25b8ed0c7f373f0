"""--kv-cache-dtype and what candle-vLLM and vLLM call it."""

import pytest
from phalanx.errors import FatalError
from phalanx.launcher.commands.fit.command import FitOptions
from phalanx.launcher.options import option_sources
from phalanx.rank.options import Options


def chosen(*words, options=Options, environ=None):
    return option_sources.read(options, words, environ or {}).options.kv_cache_dtype


def test_spellings(tmp_path):
    assert chosen() == chosen("--kv-cache-dtype", "auto") == "auto"
    for words in (
        ["--kv-cache-dtype", "fp8"], ["--kvcache-dtype=fp8_e4m3"], ["--fp8-kvcache"],
        ["--kv-cache-dtype", "auto", "--fp8-kvcache"],
    ):  # fmt: skip
        assert chosen(*words) == chosen(*words, options=FitOptions) == "fp8"
    assert chosen("--fp8-kvcache", "--kv-cache-dtype", "auto") == "auto", "the last one counts"
    assert chosen(environ={"PHALANX_KV_CACHE_DTYPE": "fp8"}) == "fp8"
    for text, kept in (("fp8_kvcache: true", "fp8"), ("fp8-kvcache: false", "auto"), ("kvcache-dtype: fp8", "fp8")):
        (tmp_path / "options.yaml").write_text(text)
        assert chosen("--config", str(tmp_path / "options.yaml")) == kept


@pytest.mark.parametrize(
    "words", [["--kv-cache-dtype", "fp8_e5m2"], ["--kvcache-dtype", "turbo4"], ["--fp8-kvcache=1"]]
)
def test_what_there_is_not_is_refused(words):
    with pytest.raises(FatalError) as stop:
        chosen(*words)
    text = str(stop.value)
    assert stop.value.code == 2 and words[0].partition("=")[0] in text
    assert "auto, fp8" in text or "takes no value" in text
    assert ("e4m3" in text) == ("e5m2" in words[-1])

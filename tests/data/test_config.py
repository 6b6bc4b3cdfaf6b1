from omegaconf import OmegaConf

from data import DataConfig


def test_the_defaults_have_no_problems():
    assert DataConfig().problems() == []


def test_every_problem_is_reported_at_once_with_key_value_and_rule():
    cfg = DataConfig(source="web", on_error="warn", validation_share=1.0, vocab_size=10, window_tokens=0, field="")
    problems = "\n".join(cfg.problems())
    for key, value in (
        ("source", "'web'"),
        ("on_error", "'warn'"),
        ("validation_share", "1.0"),
        ("vocab_size", "10"),
        ("window_tokens", "0"),
        ("field", "''"),
    ):
        assert f"data.{key}={value}: must" in problems
    assert len(cfg.problems()) == 6


def test_settings_that_contradict_the_source_are_problems():
    assert any("paths" in p for p in DataConfig(paths=["x"]).problems())
    assert any("paths" in p for p in DataConfig(source="jsonl").problems())
    assert any("paths" in p for p in DataConfig(source="hub", paths=["a", "b"]).problems())
    assert any("validation_rows" in p for p in DataConfig(source="jsonl", paths=["x"], streaming=True).problems())
    assert any("streaming" in p for p in DataConfig(streaming=True, validation_rows=1).problems())


def test_it_serves_as_a_typed_hydra_schema():
    merged = OmegaConf.merge(OmegaConf.structured(DataConfig), {"paths": ["a"], "hub_name": None})
    assert OmegaConf.to_object(merged) == DataConfig(paths=["a"])

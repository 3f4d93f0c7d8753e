"""Models of a grid are validated, with their tokenizers, before weights are loaded."""

import json
import shutil

from experiments import launch


def test_a_draft_with_another_tokenizer_is_an_error_before_the_grid_starts(tmp_path, capsys):
    shutil.copytree("experiments/zoo/draft-1", draft := tmp_path / "draft")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["import"], vocab["return"] = vocab["return"], vocab["import"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    path = tmp_path / "mine.yaml"
    path.write_text(f"methods: [{{drafter: small:{draft}}}]")
    assert launch.main([str(path), "--dry-run"]) == 2
    message = "the drafter's tokenizer differs from the target's in 2 tokens"
    assert message in capsys.readouterr().err

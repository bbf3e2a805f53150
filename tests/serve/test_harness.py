"""lm-evaluation-harness through the address (`--model local-completions`) gives the numbers of `tokenformer eval`."""

import math

import pytest
from serving import BYTES, Server, make_model

from tokenformer import hub
from tokenformer.eval.tasks import run_tasks
from tokenformer.infer.packed import Packed


@pytest.mark.slow
def test_local_completions_give_the_numbers_of_eval_on_200_rows(shared, tmp_path):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from tokenformer.eval.harness import metrics, run_harness

    tasks, model = ["piqa", "lambada_openai"], make_model(context=2048)
    hub.save(model, tmp_path / "model", format="hf", tokenizer_json=BYTES.to_json())
    folder = shared / "data" / "zero-shot"
    expected = run_tasks(Packed(model), BYTES, tasks, folder, limit=100)
    with Server(str(tmp_path / "model")) as server:
        theirs = LocalCompletionsAPI(
            model="model",
            base_url=f"{server.url}/v1/completions",
            tokenizer=str(tmp_path / "model"),
            tokenizer_backend="huggingface",
            max_length=2047,
            num_concurrent=8,
        )
        found = metrics(run_harness(theirs, tasks, data_dir=folder, limit=100))
        assert server.metric("new_tokens_total") == 300  # each row of lambada, both answers of each of piqa
    print(found)
    assert found.keys() == expected.keys()
    for task, values in expected.items():
        assert found[task].keys() == values.keys()
        for name, value in values.items():
            assert math.isclose(found[task][name], value, rel_tol=1e-4), (task, name)

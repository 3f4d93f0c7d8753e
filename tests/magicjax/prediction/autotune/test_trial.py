"""Trials count exactly, estimate tokens per round of the slowest row, and reset the prompts."""

import numpy as np
import pytest

from magicjax.decoding.decoder import Decoder
from magicjax.decoding.paired_timing import PrefilledPrompts
from magicjax.prediction.autotune.trial import run_trial
from tests.magicjax import keywords, tiny

TREE = tiny.TREES["chain4"]


def request_of(drafter, **options):
    arguments = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER) | options
    return keywords.prepare(tiny.model(), tiny.prompts(8), drafter=drafter, tree=TREE, **arguments)


def prefilled_of(request, *drafters):
    return PrefilledPrompts.create(request, drafters or [request.drafter])


@pytest.mark.slow
def test_a_sampled_trial_draws_other_numbers_than_the_run():
    """The naive text of a run is that of plain sampling; a trial's text differs in every row."""
    request = request_of(tiny.drafter("near"), temperature=1.0, seed=3, verifier="naive")
    prefilled, outputs, run = prefilled_of(request), [], Decoder.decode

    def recorded(*arguments):
        state = run(*arguments)
        outputs.append(np.array(state.output))
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "decode", recorded)
        _, prefilled = run_trial(request, "name", prefilled, 50)
    decoder = Decoder(request)
    state = decoder.decode(prefilled.start(decoder))
    output = np.asarray(state.output)[:, : tiny.NEW]
    arguments = dict(max_tokens=tiny.NEW, eos_token_id=tiny.NEVER, temperature=1.0, seed=3)
    plain = keywords.generate(tiny.model(), tiny.prompts(8), **arguments)
    for row, (length, expected) in enumerate(zip(plain.lengths, plain.tokens, strict=True)):
        np.testing.assert_array_equal(output[row, :length], expected[:length])
        if length > 4:
            assert (outputs[-1][row, 1:length] != expected[1:length]).any()
    np.testing.assert_array_equal(outputs[-1][:, 0], output[:, 0])  # prefill's token

"""What `make ahead` reads out of a program, and what it asks for; the compiler is not here."""

import types

import jax
import pytest

from magicjax import ahead

OPTIONS = types.SimpleNamespace(
    target="llama-3.1-8b",
    drafter="self:streaming:512",
    tree="chain:4",
    batch=16,
    context=32768,
    max_new_tokens=128,
    dtype="bfloat16",
    backend="mosaic",
)


def test_a_model_too_large_for_this_machine_is_described_without_its_arrays():
    request = ahead.request_of(OPTIONS)
    assert request.settings.backend == "mosaic"
    leaves = jax.tree.leaves(request.target.params)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    state = ahead.state_of(request)
    slots = request.settings.capacity
    assert 32768 <= slots < 32768 + 128
    assert state.cache.k[0].shape == (16, 8, slots, 128) and len(state.cache.k) == 32
    assert state.drafter.cache.k[0].shape == (16, 8, 512, 128)


def test_kernels_are_read_from_what_the_compiler_dumped(tmp_path):
    (tmp_path / "a.ptxas").write_text(
        "    16 bytes stack frame, 12 bytes spill stores, 40 bytes spill loads\n"
        "ptxas info    : Used 232 registers, used 16 barriers, 1 bytes smem\n"
    )
    (tmp_path / "a.resources.txt").write_text("Resources(smem_scratch_bytes=182272, ...)")
    assert ahead.kernels(tmp_path) == [
        {"registers": 232, "spilled bytes": 52, "shared bytes": 182272}
    ]


def test_copies_are_told_from_other_operations_by_name_and_size():
    text = """
      %copy.1 = bf16[2,8,64,16]{3,2,1,0} copy(%p.1)
      %copy-start = (bf16[4,4]{1,0}, bf16[4,4]{1,0}, u32[]) copy-start(%p.2)
      %copied = f32[2,2]{1,0} fusion(%p.3), calls=%copy
      %copy.2 = bf16[7,7]{1,0} copy(%broadcast.21)
    """
    assert list(ahead._copied_sizes(text)) == [2 * 8 * 64 * 16, 16]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "3", "--gpus", "2"], "--batch 3 must be a multiple of --gpus 2"),
        (["--device", "a100"], "--backend mosaic is for Hopper, not a100: use --backend xla"),
        (["--context", "64"], "--context"),
    ],
)
def test_what_cannot_be_compiled_is_refused(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["ahead", *arguments])
    with pytest.raises(SystemExit):
        ahead.main()
    assert message in capsys.readouterr().err


def test_without_the_compiler_the_error_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["ahead", "--batch", "1", "--context", "512"])
    with pytest.raises(SystemExit):
        ahead.main()
    assert "make ahead" in capsys.readouterr().err

"""Tables of tuned configurations: lookup, malformed files, and the command that writes them."""

import dataclasses
import json
import types

import jax
import pytest

from pallas_kernels.benchmarks import tune
from pallas_kernels.benchmarks.shapes import PRESETS, bench_shape
from pallas_kernels.mosaic_gpu import hopper_config, tuned
from pallas_kernels.mosaic_gpu.hopper_config import Config, candidates, config_by_rule
from pallas_kernels.mosaic_gpu.tuned import Key, nearest

DEVICE = "NVIDIA H200"
KEY = Key(heads=128, rows=20, slots=32768, head_dim=128)
FASTEST = Config(splits=3, key_groups=2, stages=4)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of tables on a machine with an H200."""
    device = types.SimpleNamespace(device_kind=DEVICE, compute_capability="9.0", core_count=132)
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    hopper_config.table.cache_clear()
    yield tmp_path
    hopper_config.table.cache_clear()


def write(config: Config | dict = FASTEST, key: Key = KEY) -> None:
    fields = dataclasses.asdict(config) if isinstance(config, Config) else config
    tune.write_table(tuned.path_of(DEVICE), {"device": DEVICE}, {key: {"config": fields}})


def choose(key: Key) -> Config:
    return hopper_config.choose_config(*key, 132)


def test_a_timed_shape_uses_the_table_and_others_the_rule(folder):
    assert choose(KEY) == config_by_rule(*KEY, 132)
    hopper_config.table.cache_clear()
    write()
    assert [path.name for path in folder.iterdir()] == ["nvidia-h200.json"]
    assert choose(KEY) == FASTEST != config_by_rule(*KEY, 132)
    far = KEY._replace(slots=4 * KEY.slots)
    assert choose(far) == config_by_rule(*far, 132)


def test_a_forced_config_takes_precedence(folder):
    write()
    with hopper_config.using(Config(splits=7)):
        assert choose(KEY) == Config(splits=7)
    assert choose(KEY) == FASTEST


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, True),
        ({"slots": 32896}, True),  # a capacity with room for new tokens
        ({"slots": 65536, "heads": 64}, True),
        ({"rows": 64}, True),  # still one tile
        ({"rows": 65}, False),
        ({"slots": 65537}, False),
        ({"heads": 257}, False),
        ({"heads": 63}, False),
        ({"head_dim": 64}, False),
    ],
)
def test_a_near_shape_matches_if_it_divides_its_work_alike(change, found):
    assert nearest({KEY: "config"}, KEY._replace(**change)) == ("config" if found else None)


def test_the_exact_shape_takes_precedence_over_the_nearest():
    table = {KEY._replace(slots=n): n for n in (16384, 32768, 65536)}
    assert nearest(table, KEY) == 32768
    assert nearest(table, KEY._replace(slots=60000)) == 65536
    assert nearest(table, KEY._replace(slots=10000)) == 16384
    assert nearest({}, KEY) is None


MALFORMED = {
    "not JSON": ("{", "Expecting"),
    "no entries": ('{"rows": []}', "'entries' is missing"),
    "not an object": ("[1]", "indices must be"),
    "a size is missing": ('{"entries": [{"heads": 1}]}', "'rows' is missing"),
    "a size is not a number": (
        '{"entries": [{"heads": "8", "rows": 1, "slots": 8, "head_dim": 64, "config": {}}]}',
        r"entry 0 has the sizes \['8', 1, 8, 64\]",
    ),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_table_is_refused(kind, folder):
    text, message = MALFORMED[kind]
    tuned.path_of(DEVICE).write_text(text)
    with pytest.raises(ValueError, match=rf"nvidia-h200\.json: .*{message}.*remove the file"):
        choose(KEY)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"warps": 4}, "unexpected keyword argument 'warps'"),
        ({"stages": 3, "key_groups": 2}, "stages=3 must be a multiple"),
        (Config(splits=2), "does not fit the device"),  # one compute warpgroup
        (Config(key_groups=2, block=128, stages=4), "does not fit the device"),  # shared memory
        (Config(splits=1024, key_groups=2), "does not fit the device"),
        (Config(row_groups=2), "does not fit the device"),  # there is only one tile
    ],
)
def test_a_config_that_cannot_run_is_refused(config, message, folder):
    write(config)
    with pytest.raises(ValueError, match=rf"nvidia-h200\.json: Key\(.*{message}"):
        choose(KEY)


def test_a_shape_twice_is_refused(folder):
    write()
    path = tuned.path_of(DEVICE)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({"entries": 2 * content["entries"]}))
    with pytest.raises(ValueError, match="entry 1 repeats the sizes"):
        choose(KEY)


@pytest.mark.parametrize("shape", PRESETS["hopper"], ids=str)
def test_every_candidate_fits_and_the_rule_is_first(shape):
    key = tune.key_of(shape)
    configs = candidates(*key, 132)
    assert configs[0] == config_by_rule(*key, 132) and len(set(configs)) == len(configs) > 20
    assert all(hopper_config.fits(c, key.rows, key.slots, key.head_dim) for c in configs)


SHAPES = [bench_shape(2, 512, 2, 4, 128, 5), bench_shape(1, 512, 2, 4, 128, 5)]


class Fake:
    """A timer for which more splits are faster, some results differ, some do not compile."""

    made = 0

    def __init__(self, shape, rule):
        type(self).made += 1

    def seconds(self, config):
        if config.block == 128:
            raise ValueError("too many registers")
        return None if config.stages == 2 else 1e-3 / config.splits


def entries(folder):
    return tuned.read(tuned.path_of(DEVICE))


def test_the_fastest_config_is_written_with_all_timings(folder):
    path = tuned.path_of(DEVICE)
    assert tune.tune(SHAPES, path, {"device": DEVICE}, seconds=60, make=Fake)
    for shape in SHAPES:
        key = tune.key_of(shape)
        entry, configs = entries(folder)[key], candidates(*key, 132)
        usable = [c for c in configs if c.block == 64 and c.stages > 2]
        assert Config(**entry["config"]).splits == max(c.splits for c in usable)
        assert [t["config"] for t in entry["timings"]] == [dataclasses.asdict(c) for c in configs]
        failed = [t["failed"] for t in entry["timings"] if "failed" in t]
        assert len(failed) == len(configs) - len(usable)
        assert any("too many registers" in reason for reason in failed)
        assert entry["seconds"] <= entry["seconds_by_rule"]
        assert choose(key) == Config(**entry["config"])


def test_an_interrupted_run_keeps_its_timings(folder):
    path, calls = tuned.path_of(DEVICE), []

    class Killed(Fake):
        def seconds(self, config):
            calls.append(config)
            if len(calls) == 5:
                raise KeyboardInterrupt
            return super().seconds(config)

    with pytest.raises(KeyboardInterrupt):
        tune.tune(SHAPES, path, {}, seconds=60, make=Killed)
    (entry,) = entries(folder).values()
    assert len(entry["timings"]) == 4
    assert tune.tune(SHAPES, path, {}, seconds=60, make=Killed)
    assert len(calls) - 1 == sum(len(e["timings"]) for e in entries(folder).values())
    made = Fake.made
    assert tune.tune(SHAPES, path, {}, seconds=60, make=Fake) and Fake.made == made


def test_running_out_of_time_is_reported(folder):
    assert not tune.tune(SHAPES, tuned.path_of(DEVICE), {}, seconds=0, make=Fake)


def test_a_rule_that_cannot_run_is_an_error(folder):
    class Broken(Fake):
        def seconds(self, config):
            raise ValueError("no such instruction")

    with pytest.raises(ValueError, match="no such instruction"):
        tune.tune(SHAPES, tuned.path_of(DEVICE), {}, seconds=60, make=Broken)


def test_configurations_are_listed_on_any_machine(capsys):
    assert tune.main(["--list", "--shape", "2,512,2,4,128,5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(candidates(4, 20, 512, 128, hopper_config.MULTIPROCESSORS))
    assert lines[0].startswith("B2-T5-N5-K2-G4-D128-S512: Config(splits=")
    with pytest.raises(SystemExit):
        tune.main([])
    assert "runs on NVIDIA Hopper GPUs" in capsys.readouterr().err

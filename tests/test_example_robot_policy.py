"""The parts of examples/robot_policy, and a smoke run of the whole where the simulator is installed."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "robot_policy"
sys.path.insert(0, str(EXAMPLE))  # its modules import each other as scripts do, in spawned processes too

import cache  # noqa: E402
import data  # noqa: E402
import intervals  # noqa: E402
import policy  # noqa: E402
import results  # noqa: E402
import stage1  # noqa: E402

import lightning_npu as npu  # noqa: E402
from lightning_npu import keys  # noqa: E402


def some_frames(count: int = 8, seed: int = 0) -> data.Frames:
    rng = np.random.default_rng(seed)
    return data.Frames(
        images=rng.integers(0, 256, (count, 3, 96, 96), dtype=np.uint8),
        states=rng.normal(size=(count, 4)).astype(np.float32),
        actions=rng.uniform(-1, 1, (count, 16, 4)).astype(np.float32),
        valid=rng.random((count, 16)) < 0.9,
        episodes=np.repeat(np.arange(count // 4), 4),
    )


# ---- networks


def test_encoder_gives_keys_and_values_of_every_layer_and_the_expert_reads_them_all() -> None:
    torch.manual_seed(0)
    encoder, expert = policy.VisualEncoder().eval(), policy.ActionExpert().eval()
    with torch.no_grad():
        features = encoder(torch.randn(3, 3, 96, 96))
    assert [tuple(f.shape) for f in features] == [(3, 36, 128)] * 8
    leaves = [f.requires_grad_() for f in features]
    actions = expert(tuple(leaves), torch.randn(3, 4))
    assert actions.shape == (3, 16, 4)
    actions.sum().backward()
    assert all(leaf.grad is not None and leaf.grad.abs().sum() > 0 for leaf in leaves)


def test_every_encoder_parameter_is_trained_in_stage_1() -> None:
    torch.manual_seed(0)
    encoder, expert = policy.VisualEncoder(), policy.ActionExpert()
    expert(encoder(torch.randn(2, 3, 96, 96)), torch.randn(2, 4)).square().sum().backward()
    untrained = [name for name, p in encoder.named_parameters() if p.grad is None]
    assert untrained == []


@pytest.mark.parametrize("cut", ["stem", "layers.0", "layers.1", "layers.2"])
def test_the_encoder_can_be_cut_where_the_conditions_cut_it(cut: str) -> None:
    torch.manual_seed(0)
    encoder, images = policy.VisualEncoder().eval(), torch.randn(2, 3, 96, 96)
    head, tail = npu.split_module(encoder, cut, (images,))
    with torch.no_grad():
        head_outputs = head(images)
        actual, expected = tail(*head_outputs), encoder(images)
    assert len(actual) == 8
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0)


def test_a_frozen_encoder_stays_in_eval_mode_and_gets_no_gradient() -> None:
    from learner import BehaviourCloning

    frames = some_frames()
    model = BehaviourCloning(policy.VisualEncoder(), *data.state_statistics(frames), freeze_encoder=True)
    model.train()
    assert not any(m.training for m in model.encoder.modules())
    assert model.expert.training
    model(torch.randn(2, 3, 96, 96), torch.randn(2, 4)).sum().backward()
    assert all(p.grad is None for p in model.encoder.parameters())
    assert all(p.grad is not None for p in model.expert.parameters())


# ---- data


def test_augmentation_follows_the_seed_alone() -> None:
    frames = some_frames()

    def draw(seed: int) -> list[dict[str, torch.Tensor]]:
        dataset = data.DemonstrationDataset(frames, seed=seed)
        torch.rand(7)  # what others draw does not matter
        return [dataset[i] for i in (3, 1, 3)]

    first, again, other = draw(5), draw(5), draw(6)
    assert all(torch.equal(a[key], b[key]) for a, b in zip(first, again, strict=True) for key in a)
    assert not torch.equal(first[0]["images"], other[0]["images"])
    assert not torch.equal(first[0]["images"], first[2]["images"]), "each visit draws anew"
    assert torch.equal(first[0]["actions"], other[0]["actions"])


def test_without_augmentation_the_sample_is_the_frame() -> None:
    frames = some_frames()
    sample = data.DemonstrationDataset(frames, augment=False)[2]
    assert torch.equal(sample["images"], (torch.from_numpy(frames.images[2]).float() - 110) / 60)
    assert torch.equal(sample["state"], torch.from_numpy(frames.states[2]))


def test_random_shift_moves_the_image_and_repeats_the_edge() -> None:
    image = np.arange(3 * 10 * 10, dtype=np.uint8).reshape(3, 10, 10)
    padded = np.pad(image, ((0, 0), (2, 2), (2, 2)), mode="edge")
    windows = {padded[:, y : y + 10, x : x + 10].tobytes() for y in range(5) for x in range(5)}
    rng = np.random.default_rng(0)
    seen = {data.random_shift(image, 2, rng).tobytes() for _ in range(400)}
    assert seen == windows


def test_batches_follow_the_seed(tmp_path: Path) -> None:
    def batches(seed: int) -> list[torch.Tensor]:
        module = data.Demonstrations(data.Recipe(("none",), 1), tmp_path, batch_size=4, seed=seed)
        module.frames = some_frames()
        return [batch["images"] for batch in module.train_dataloader()]

    assert all(torch.equal(a, b) for a, b in zip(batches(0), batches(0), strict=True))
    assert not torch.equal(batches(0)[0], batches(1)[0])


# ---- files


@pytest.mark.parametrize("damage", ["truncated", "edited", "empty", "other content"])
def test_a_damaged_demonstration_file_is_recorded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    recorded = []

    def record(recipe: data.Recipe, processes: int) -> data.Frames:
        recorded.append(recipe)
        return some_frames()

    monkeypatch.setattr(data, "record", record)
    recipe = data.Recipe(("button-press-v3",), 2)
    data.demonstrations(recipe, tmp_path)
    (path,) = (tmp_path / "demonstrations").iterdir()
    data.demonstrations(recipe, tmp_path)
    assert len(recorded) == 1, "the second time it comes from the cache"

    content = bytearray(path.read_bytes())
    if damage == "truncated":
        content = content[: len(content) // 2]
    elif damage == "edited":
        content[len(content) // 2] ^= 0xFF
    elif damage == "empty":
        content = bytearray()
    else:
        np.savez(path, images=np.zeros((1, 3, 96, 96), np.uint8))
        content = bytearray(path.read_bytes())
    path.write_bytes(content)
    frames = data.demonstrations(recipe, tmp_path)
    assert len(recorded) == 2
    assert np.array_equal(frames.images, some_frames().images)
    assert f"{path} is damaged" in capsys.readouterr().out
    data.demonstrations(recipe, tmp_path)
    assert len(recorded) == 2, "what was recorded again is whole"
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing half-written is left behind"


def test_another_recipe_never_reads_this_ones_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "record", lambda recipe, processes: some_frames(seed=recipe.per_task))
    first = data.demonstrations(data.Recipe(("a",), 4), tmp_path)
    second = data.demonstrations(data.Recipe(("a",), 4, noise=0.1), tmp_path)
    assert len(list((tmp_path / "demonstrations").iterdir())) == 2
    assert np.array_equal(first.images, second.images)


def test_a_file_is_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file.txt"

    def write(text: str, fail: bool) -> None:
        with cache.whole_file(path) as temporary:
            temporary.write_text(text)
            if fail:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write("half", fail=True)
    assert list(path.parent.iterdir()) == []
    write("whole", fail=False)
    with pytest.raises(KeyboardInterrupt):
        write("half", fail=True)
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


def test_the_stage_1_file_is_the_one_its_sidecar_describes() -> None:
    described = json.loads(stage1.STAGE1_FILE.with_suffix(".json").read_text())
    assert cache.sha256_of(stage1.STAGE1_FILE) == described["sha256"]
    assert "pretrain.py" in described["command"]
    assert not any("button" in task and "coffee" not in task for task in described["recipe"]["tasks"])
    assert stage1.STAGE1_FILE.stat().st_size <= 4_000_000
    encoder = stage1.load_encoder()
    assert {p.dtype for p in encoder.parameters()} == {torch.float32}
    assert all(p.isfinite().all() for p in encoder.parameters())


def test_the_stage_1_file_round_trips_and_an_edited_one_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    encoder = policy.VisualEncoder()
    encoder.train()(torch.randn(4, 3, 96, 96))  # statistics that are not the initial ones
    path = tmp_path / "encoder.npz"
    stage1.save_encoder(encoder, path, {"command": "a test"})
    loaded = stage1.load_encoder(path)
    images = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        for ours, theirs in zip(loaded(images), encoder.eval()(images), strict=True):
            assert (ours - theirs).norm() <= 5e-3 * theirs.norm()
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"expected SHA-256 [0-9a-f]{64}, got [0-9a-f]{64}; restore the file"):
        stage1.load_encoder(path)


# ---- figures


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(59, 60, 0.9114, 0.9971), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_interval_against_published_values(successes: int, trials: int, low: float, high: float) -> None:
    assert intervals.wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (3, 2), (-1, 5)])
def test_wilson_interval_refuses_what_is_no_rate(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match="expected 0 <= successes <= trials"):
        intervals.wilson(successes, trials)


def outcomes(both: int, only_ours: int, only_reference: int, neither: int) -> tuple[list[bool], list[bool]]:
    ours = [True] * (both + only_ours) + [False] * (only_reference + neither)
    reference = [True] * both + [False] * only_ours + [True] * only_reference + [False] * neither
    return ours, reference


def test_paired_interval_against_the_paper_that_it_is_from() -> None:
    difference, interval = intervals.paired_difference(*outcomes(36, 12, 2, 0))
    assert difference == pytest.approx(0.2)
    assert interval == pytest.approx((0.0569, 0.3404), abs=5e-5)


def test_paired_interval_has_a_width_where_all_agree_and_covers_the_truth() -> None:
    difference, (low, high) = intervals.paired_difference(*outcomes(300, 0, 0, 0))
    assert difference == 0
    assert -0.02 < low < 0 < high < 0.02
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        hard = rng.random(300)
        ours, reference = hard < 0.95 - 0.03 * (rng.random(300) < 0.5), hard < 0.96
        _, (low, high) = intervals.paired_difference(list(ours), list(reference))
        hits += low <= (0.935 - 0.96) <= high
    assert 0.93 <= hits / 1000 <= 0.99


def test_paired_interval_refuses_different_seeds() -> None:
    with pytest.raises(ValueError, match="got 2 and 1"):
        intervals.paired_difference([True, False], [True])


def test_interval_over_trainings_is_students_and_needs_two() -> None:
    mean, (low, high) = intervals.over_trainings([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (mean, low, high) == pytest.approx((3.0, 1.0367, 4.9633), abs=1e-4)  # 2.7764 x 1.5811 / 5 ** 0.5
    with pytest.raises(ValueError, match="expected two or more trainings, got 1"):
        intervals.over_trainings([1.0])


def test_table_over_seeds_compares_trainings_of_the_same_seed() -> None:
    def result(seed: int, offload: str, solved: int, encoder: str = "stage1") -> dict[str, object]:
        base = {"task": "t", "seed": seed, "steps": 10, "demos": 2, "episode_seeds": [100_000, 10], "encoder": encoder}
        return {**base, "offload": offload, "solved": [i < solved for i in range(10)], "training_cpu_s": 4.0 + seed}

    fp32 = [result(seed, "none", solved) for seed, solved in enumerate((10, 8, 9))]
    ours = [result(seed, "L4", solved) for seed, solved in enumerate((9, 8, 10))]
    control = [result(0, "none", 3, "random")]
    _, _, first, second = results.table_over_seeds([*fp32, *ours, *control]).splitlines()
    assert [cell.strip() for cell in first.split("|")][4:9] == ["FP32 in torch", "3", "90.0 %", "80.0 %", ""]
    cells = [cell.strip() for cell in second.split("|")]
    assert cells[4:8] == ["L4 INT8", "3", "90.0 %", "80.0 %"]
    assert cells[8] == "+0.0 [-24.8, +24.8]"  # differences of -10, 0 and 10 points
    assert cells[9] == "5"
    assert results.table_over_seeds([*fp32[:1], *ours[:1]]) == ""


def test_table_pairs_a_run_with_the_fp32_run_of_the_same_settings_only() -> None:
    def result(offload: str, encoder: str = "stage1", **other: object) -> dict[str, object]:
        fidelity = {} if offload == "none" else {"k": {"sqnr_db": 30.25, "cosine": 1.0, "max_abs_error": 0.0}}
        base = {"task": "t", "seed": 0, "steps": 10, "demos": 2, "episode_seeds": [100_000, 10], "fidelity": fidelity}
        solved = [offload == "none" or i > 0 for i in range(10)]
        timing = {"samples_per_s": 100.0, "training_s": 3.0, "training_cpu_s": 4.0}
        return {**base, "offload": offload, "encoder": encoder, "solved": solved, **timing, **other}

    none, ours, control, other = result("none"), result("L4"), result("none", "random"), result("L4", seed=1)
    everything = [none, ours, control, other]
    assert results.baseline_of(ours, everything) is none
    assert results.baseline_of(control, everything) is none
    assert results.baseline_of(none, everything) is None
    assert results.baseline_of(other, everything) is None
    assert results.baseline_of(result("L4", steps=11), everything) is None
    text = results.table(everything).splitlines()
    assert "L4 INT8" in text[3]
    assert "9/10 = 90.0 %" in text[3]
    assert "-10.0 [" in text[3]
    assert "30.2" in text[3]
    assert math.isclose(len(text[0]), len(text[3]))


# ---- rendering


def test_without_a_renderer_it_stops_with_one_sentence_that_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import check_rendering
    import rendering

    def never() -> None:
        raise AssertionError("only root installs")

    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(rendering, "works", lambda backend: False)
    monkeypatch.setattr(check_rendering, "install", never)
    monkeypatch.setattr(check_rendering.os, "geteuid", lambda: 1000)
    assert check_rendering.main() == 1
    message = capsys.readouterr().err.strip()
    assert message.endswith(f"type: sudo apt-get install -y {' '.join(rendering.DEBIAN_PACKAGES)}")
    assert "\n" not in message


def test_as_root_the_renderer_is_installed_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import check_rendering
    import rendering

    installed = []
    monkeypatch.setenv("MUJOCO_GL", "")
    monkeypatch.setattr(rendering, "works", lambda backend: backend == "egl" and bool(installed))
    monkeypatch.setattr(check_rendering, "install", lambda: installed.append(True))
    monkeypatch.setattr(check_rendering.os, "geteuid", lambda: 0)
    monkeypatch.setattr(check_rendering.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert check_rendering.main() == 0
    assert installed == [True]


def test_a_backend_that_the_user_has_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import rendering

    monkeypatch.setenv("MUJOCO_GL", "glfw")
    monkeypatch.setattr(rendering, "works", lambda backend: pytest.fail("nothing is probed"))
    assert rendering.select_backend() == "glfw"


# ---- the whole


def check_the_dashboard_run(folder: Path, result: dict[str, Any]) -> None:
    """W&B's offline file holds the documented keys, joules that only grow, and the final figures."""
    import wandb
    import wandb_file

    wandb.finish()
    found = wandb_file.finished_run(folder)
    wandb.teardown()  # or the environment of this run would hold for all of the process
    rows = [row for row in wandb_file.history(found) if keys.TOTAL_J in row]
    logged = set().union(*rows)
    assert logged >= {keys.BOARD_POWER_W, keys.GPU_POWER_W, keys.NPU_POWER_W, keys.PER_SAMPLE_J, keys.UNCERTAINTY_J}
    assert logged >= {keys.WAIT_S, keys.HIT_RATE, keys.QUEUE_DEPTH, keys.phase_j("train"), keys.phase_j("data_wait")}
    assert logged >= {keys.board_power_w("simulated-gpu0"), keys.board_power_w("simulated-npu1")}
    assert all("simulated" in key for key in logged if key.startswith("energy/board/"))
    for key in (keys.TOTAL_J, keys.GPU_J, keys.NPU_J, keys.ELAPSED_S):
        values = [row[key] for row in rows]
        assert values == sorted(values)
        assert values[-1] > values[0] > 0
    axes = wandb_file.metrics(found)
    assert axes["energy/*"] == axes["npu/*"] == keys.ELAPSED_S
    final = wandb_file.summary(found)
    assert final[keys.TOTAL_J] == pytest.approx(result["energy"]["total"]["energy_j"], rel=1e-3)
    assert final[keys.PER_SAMPLE_J] == pytest.approx(result["energy"]["per_sample_j"], rel=1e-3)


def test_smoke_run_from_demonstrations_to_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("metaworld") is None:
        pytest.skip("metaworld is not installed: pip install lightning-npu[robot]")
    import rendering

    try:
        rendering.select_backend()
    except rendering.NoRenderer as missing:
        pytest.skip(str(missing))
    import train

    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path), "X_DISABLE_STATS": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    arguments = ["--offload", "L1", "--demos", "2", "--steps", "60", "--batch-size", "8", "--episodes", "2"]
    arguments += ["--first-episode", "50000", "--processes", "1", "--cache", str(tmp_path)]
    arguments += ["--logger", "wandb", "--power", "simulated"]
    first = train.run(train.parse(arguments))
    assert len(first["solved"]) == len(first["episode_steps"]) == 2
    assert len(first["fidelity"]) == 3, "K1, V1 and the tokens that the tail goes on from"
    assert min(f["sqnr_db"] for f in first["fidelity"].values()) > 20
    (picture,) = tmp_path.glob("runs/*/rollout.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "simulated" in results.table([first])
    check_the_dashboard_run(tmp_path, first)

    def never(*arguments: object) -> None:
        raise AssertionError("what is in the cache is not made again")

    monkeypatch.setattr(train, "fit", never)
    monkeypatch.setattr(data, "record", never)
    again = train.run(train.parse(arguments))
    assert again["solved"] == first["solved"]
    assert again["episode_steps"] == first["episode_steps"]
    assert again["training_s"] == first["training_s"]

    (checkpoint,) = tmp_path.glob("runs/*/policy.ckpt")
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(AssertionError, match="not made again"):  # a broken policy is trained again, not loaded
        train.run(train.parse(arguments))

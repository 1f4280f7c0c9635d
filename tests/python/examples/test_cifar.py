"""The CIFAR-10 program and its port to DeepSpeed: equal weights, resumed runs, data files, printed lines, edits."""

import re

import pytest
import torch

import example_programs as programs
from refusals import refusing

SMALL = ("--images", 320, "-e", 2, "--log-interval", 5)  # 20 steps
SIMILAR = pytest.mark.every("it is like the pyramid of experts")
ZERO = {"stage3_param_persistence_threshold": 0}
CLASSES = ["plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.fixture(scope="module")
def plain():
    """``(weights, losses, text)`` of 20 steps of plain.py."""
    return programs.run_plain("cifar", *SMALL)


def accuracy(text):
    return int(re.search(r"^Accuracy of the network on the 1000 test images: +(\d+) %$", text, re.M).group(1))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_port_trains_the_same_weights(stage, ranks, plain, tmp_path):
    config = programs.config_file("cifar", tmp_path, zero_optimization={"stage": stage, **ZERO})
    results = programs.run_on(ranks, "cifar", "ds", *SMALL, "--deepspeed", "--deepspeed_config", config)
    for weights, _, _ in results:
        assert programs.farthest(weights, plain[0]) < 1e-5
    means = torch.tensor([losses for _, losses, _ in results]).mean(0)
    assert len(means) == 20 and (means - torch.tensor(plain[1])).abs().max() < 1e-5
    assert abs(accuracy(results[0][2]) - accuracy(plain[2])) <= 1
    assert all(text == "" for _, _, text in results[1:])


def test_the_printed_lines(plain):
    lines = plain[2].splitlines()
    assert lines[0] == "cpu"
    for line, (epoch, step) in zip(lines[1:5], [(1, 5), (1, 10), (2, 5), (2, 10)]):
        assert re.fullmatch(rf"\[{epoch}, +{step}\] loss: \d\.\d\d\d", line), line
    assert lines[5:7] == ["Finished Training", "GroundTruth:  plane car bird cat"]
    assert re.fullmatch("Predicted:  (plane|car|bird|cat|deer|dog|frog|horse|ship|truck| ){7}", lines[7])
    each = [re.fullmatch(r"Accuracy of +(\w+) : +(\d+) %", line).groups() for line in lines[9:]]
    assert [name for name, _ in each] == CLASSES
    assert abs(sum(int(share) for _, share in each) / 10 - accuracy(plain[2])) <= 1


def test_both_programs_learn_the_made_images(tmp_path):
    config = programs.config_file("cifar", tmp_path)
    options = ("--images", 640, "-e", 6)
    reached = accuracy(programs.run_plain("cifar", *options)[2])
    assert 95 < reached
    (_, _, text), _ = programs.run_on(2, "cifar", "ds", *options, "--deepspeed_config", config)
    assert abs(accuracy(text) - reached) <= 1


def test_a_resumed_run_has_the_bits_of_one_run(tmp_path):
    config = programs.config_file("cifar", tmp_path, zero_optimization={"stage": 2})
    options = ("--images", 320, "--deepspeed_config", config)
    whole, saved, more = (
        programs.run_on(2, "cifar", "ds", *options, *given)[0]
        for given in (["-e", 2], ["-e", 1, "--save", tmp_path / "run"], ["-e", 2, "--resume", tmp_path / "run"])
    )
    assert programs.farthest(more[0], whole[0]) == 0 and programs.farthest(saved[0], whole[0]) > 0
    assert saved[1] + more[1] == whole[1]


def test_a_resumed_run_of_the_plain_program(plain, tmp_path):
    programs.run_plain("cifar", "--images", 320, "-e", 1, "--save", tmp_path / "net.pt")
    weights, losses, _ = programs.run_plain("cifar", *SMALL, "--resume", tmp_path / "net.pt")
    assert programs.farthest(weights, plain[0]) == 0 and losses == plain[1][10:]


def test_a_folder_without_checkpoint(tmp_path):
    config = programs.config_file("cifar", tmp_path)
    with refusing(SystemExit, "--resume", "this folder has no checkpoint"):
        programs.run_on(1, "cifar", "ds", *SMALL, "--deepspeed_config", config, "--resume", tmp_path)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.every("it is like stage 3")), 3])
def test_an_average_of_the_weights(stage, plain, tmp_path):
    """The average is tested instead of the last weights, so few steps give another accuracy."""
    config = programs.config_file("cifar", tmp_path, zero_optimization={"stage": stage, **ZERO})
    with_average = programs.run_plain("cifar", *SMALL, "--use_ema")[2]
    assert with_average != plain[2]
    (_, _, text), _ = programs.run_on(2, "cifar", "ds", *SMALL, "--use_ema", "--deepspeed_config", config)
    assert abs(accuracy(text) - accuracy(with_average)) <= 1


@pytest.mark.parametrize(
    "flags, local",
    [
        pytest.param(["--num-experts", 2, "--ep-world-size", 2], 1, marks=SIMILAR),
        (["--num-experts", 2, 4, "--mlp-type", "residual", "--moe-param-group", "--ep-world-size", 2], 3),
        pytest.param(
            ["--num-experts", 2, "--top-k", 2, "--min-capacity", 4, "--noisy-gate-policy", "RSample"], 2, marks=SIMILAR
        ),
    ],
)
def test_experts(flags, local, tmp_path):
    """``local``: experts of each rank, in all layers."""
    config = programs.config_file("cifar", tmp_path, zero_optimization={"stage": 2})
    options = ("--images", 640, "-e", 5, "--moe", *flags, "--deepspeed_config", config)
    (weights, losses, text), _ = programs.run_on(2, "cifar", "ds", *options)
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10]) and accuracy(text) > 70
    assert weights["fc3.fc4.weight"].shape == (10, 84)
    assert sum(".experts." in name and name.endswith("weight") for name in weights) == local


def records(labels, size=3073):
    pixels = torch.arange(len(labels) * (size - 1)).view(len(labels), -1) % 251
    return bytes(torch.cat([torch.tensor(labels)[:, None], pixels], 1).to(torch.uint8).flatten().tolist())


def test_binary_files(tmp_path):
    (tmp_path / "data_batch_1.bin").write_bytes(records([3, 9]))
    (tmp_path / "data_batch_2.bin").write_bytes(records([0]))
    (tmp_path / "test_batch.bin").write_bytes(records([7, 7]))
    with programs.loaded("cifar", "cifar10") as cifar10:
        train, test = cifar10.data_sets(cifar10.parser().parse_args(["--data", str(tmp_path)]))
    assert [train[i][1].item() for i in range(3)] == [3, 9, 0] and test.labels.tolist() == [7, 7]
    image, _ = train[1]
    assert image.shape == (3, 32, 32) and abs(image[1, 2, 3] * 127.5 + 127.5 - (3072 + 1024 + 2 * 32 + 3) % 251) < 1e-3
    weights, losses, text = programs.run_plain("cifar", "--data", tmp_path, "-e", 1)
    assert len(losses) == 1 and "on the 2 test images" in text and "Accuracy of   horse" in text
    assert text.count("Accuracy of ") == 2


@pytest.mark.parametrize(
    "data, words",
    [
        (records([1, 2])[:-5], "record 1 has 3068 bytes instead of 3073"),
        (b"", "this one has 0 bytes"),
        (records([1, 9, 10, 200]), "record 2 has the label 10"),
    ],
)
def test_a_wrong_file_is_one_line(data, words, tmp_path):
    (tmp_path / "data_batch_1.bin").write_bytes(data)
    (tmp_path / "test_batch.bin").write_bytes(records([7]))
    with refusing(SystemExit, words, str(tmp_path / "data_batch_1.bin")):
        programs.run_program("cifar", "plain", ["--data", tmp_path])


def test_a_folder_without_the_files(tmp_path):
    with refusing(SystemExit, str(tmp_path), "data_batch_1.bin"):
        programs.run_program("cifar", "plain", ["--data", tmp_path])


def test_the_edits_are_few_and_in_the_readme():
    programs.check_edits("cifar")


@pytest.mark.slow
@pytest.mark.dist
def test_the_command_of_the_readme():
    """Without ``-e`` this takes ten seconds."""
    text = programs.launch("cifar", "--deepspeed", "--deepspeed_config", "ds_config.json", "-e", 4)
    assert re.search(r"^\[4, +20\] loss: 0\.", text, re.M) and accuracy(text) > 85
    assert text.count("Finished Training") == 1

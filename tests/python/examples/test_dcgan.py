"""The DCGAN program and its port to DeepSpeed: equal weights of both networks, accumulation, images, lines, edits."""

import os
import re
import sys

import pytest
import torch

import example_programs as programs
from refusals import refusing

SMALL = ("--images", 40, "--niter", 4, "--imageSize", 16, "--ngf", 4, "--ndf", 4, "--nz", 10, "--lr", 0.002)
BATCH = 8  # 20 steps
LINE = re.compile(
    r"\[\d/4\]\[\d/5\] Loss_D: \d+\.\d{4} Loss_G: \d+\.\d{4} D\(x\): 0\.\d{4} D\(G\(z\)\): 0\.\d{4} / 0\.\d{4}"
)


@pytest.fixture(scope="module")
def plain():
    """``(weights, losses, text)`` of 20 steps of plain.py."""
    return programs.run_plain("dcgan", *SMALL, "--batchSize", BATCH)


@pytest.mark.parametrize("stage", range(4))
def test_the_port_trains_the_same_weights(stage, plain, tmp_path):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = programs.config_file("dcgan", tmp_path, train_batch_size=BATCH, zero_optimization=zero)
    ((weights, losses, text),) = programs.run_on(1, "dcgan", "ds", *SMALL, "--deepspeed", "--deepspeed_config", config)
    assert {name[:5] for name in weights} == {"netG.", "netD."}
    assert programs.farthest(weights, plain[0]) < 1e-5
    assert len(losses) == 20 and (torch.tensor(losses) - torch.tensor(plain[1])).abs().max() < 1e-4
    assert [line for line in text.splitlines() if LINE.fullmatch(line)] == plain[2].splitlines()


def test_the_printed_lines(plain):
    lines = plain[2].splitlines()
    assert len(lines) == 4 and all(LINE.fullmatch(line) for line in lines)


def test_the_discriminator_gets_no_gradients_of_the_generator(plain, tmp_path):
    """Two micro-batches of four images are a step on eight. Batch normalization sees four, so the networks of plain
    PyTorch do so, too."""
    config = programs.config_file("dcgan", tmp_path, train_batch_size=BATCH, gradient_accumulation_steps=2)
    ((weights, losses, _),) = programs.run_on(1, "dcgan", "ds", *SMALL, "--deepspeed_config", config)
    assert len(losses) == 40
    wanted = programs.run_ranks(1, accumulated, [str(argument) for argument in SMALL], env=programs.ALONE)[0]
    assert programs.farthest(weights, wanted) < 1e-5


def accumulated(rank, world_size, argv):
    """The weights of a loop over micro-batches of four images that steps after each second one."""
    with programs.loaded("dcgan", "gan_parts") as gan_parts:
        args = gan_parts.get_argument_parser().parse_args(argv)
        images = gan_parts.data_set(args)
        torch.manual_seed(args.manualSeed)
        nets = {"netG.": gan_parts.generator(args), "netD.": gan_parts.discriminator(args)}
    G, D = nets["netG."], nets["netD."]
    optimizers = {net: torch.optim.Adam(net.parameters(), lr=args.lr, betas=(0.5, 0.999)) for net in (G, D)}
    sampler = torch.utils.data.DistributedSampler(images, num_replicas=1, rank=0)
    random = torch.Generator().manual_seed(args.manualSeed)
    grads = {net: [torch.zeros_like(p) for p in net.parameters()] for net in (G, D)}

    def add(net, loss, last):
        for total, grad in zip(grads[net], torch.autograd.grad(loss / 2, list(net.parameters()), retain_graph=True)):
            total += grad
        if last:
            for param, total in zip(net.parameters(), grads[net]):
                param.grad = total.clone()
                total.zero_()
            optimizers[net].step()

    bce, micro = torch.nn.functional.binary_cross_entropy, 0
    for epoch in range(args.niter):
        sampler.set_epoch(epoch)
        for real in torch.utils.data.DataLoader(images, 4, sampler=sampler):
            micro += 1
            add(D, bce(D(real), torch.ones(4)), last=False)
            fake = G(torch.randn(4, args.nz, 1, 1, generator=random))
            add(D, bce(D(fake.detach()), torch.zeros(4)), last=micro % 2 == 0)
            add(G, bce(D(fake), torch.ones(4)), last=micro % 2 == 0)
    return {f"{key}{name}": p.detach().clone() for key, net in nets.items() for name, p in net.named_parameters()}


def test_two_ranks_have_the_same_weights_and_other_images(tmp_path):
    config = programs.config_file("dcgan", tmp_path, train_batch_size=BATCH)
    options = (*SMALL, "--deepspeed_config", config, "--outf", tmp_path / "out")
    (weights, losses, text), (others, other_losses, other_text) = programs.run_on(2, "dcgan", "ds", *options)
    assert programs.farthest(weights, others) == 0 and losses != other_losses
    assert LINE.search(text) and other_text == ""
    assert sorted(os.listdir(tmp_path / "out")) == [f"fake_samples_epoch_00{epoch}.ppm" for epoch in range(4)]
    with programs.loaded("dcgan", "gan_parts") as gan_parts:
        assert gan_parts.read_ppm(str(tmp_path / "out" / "fake_samples_epoch_003.ppm")).shape == (4 * 16, 16, 3)


def test_no_gpu_and_one_gpu_are_the_same_on_a_cpu(plain):
    weights, losses, _ = programs.run_plain("dcgan", *SMALL, "--batchSize", BATCH, "--ngpu", 0)
    assert programs.farthest(weights, plain[0]) == 0 and losses == plain[1]


def test_a_folder_of_images(tmp_path):
    """A wide image loses its left and right parts, and shrinks to the size that is asked for."""
    os.makedirs(tmp_path / "faces")
    pixels = torch.zeros(16, 32, 3, dtype=torch.uint8)
    pixels[:, 8:16], pixels[:, 16:24, 1] = 255, 51
    (tmp_path / "faces" / "one.PPM").write_bytes(b"P6 # wide\n32 16\n255\n" + bytes(pixels.flatten().tolist()))
    with programs.loaded("dcgan", "gan_parts") as gan_parts:
        gan_parts.write_ppm(str(tmp_path / "two.ppm"), torch.full((1, 3, 8, 8), -1.0))
        images = gan_parts.Folder(str(tmp_path), 8)
        assert len(images) == 2 and images[0].shape == images[1].shape == (3, 8, 8)
        wanted = torch.tensor([-1.0, -0.6, -1.0]).view(3, 1, 1)
        assert (images[0][:, :, :3] - 1).abs().max() < 1e-6 and (images[0][:, :, 5:] - wanted).abs().max() < 1e-6
        assert (images[1] + 1).abs().max() < 1e-6
    assert len(programs.run_plain("dcgan", *SMALL, "--data", tmp_path)[1]) == 4


def test_png_needs_pillow(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (20, 10), (255, 0, 51)).save(tmp_path / "image.png")
    with programs.loaded("dcgan", "gan_parts") as gan_parts:
        (pixels,) = gan_parts.Folder(str(tmp_path), 8)
        assert (pixels - torch.tensor([1.0, -1.0, -0.6]).view(3, 1, 1)).abs().max() < 1e-6
        monkeypatch.setitem(sys.modules, "PIL", None)
        with refusing(SystemExit, "image.png", "Pillow", "PPM"):
            gan_parts.Folder(str(tmp_path), 8)[0]


@pytest.mark.parametrize(
    "name, data, words",
    [
        ("bad.ppm", b"P6 4 4 255\n" + bytes(47), "not a whole PPM file"),
        ("bad.ppm", b"P3 1 1 255\n0 0 0", "not a whole PPM file"),
        ("bad.png", b"\x89PNG and more", "Pillow"),
        ("other.txt", b"", "needs a folder with images"),
    ],
)
def test_a_wrong_image_is_one_line(name, data, words, tmp_path):
    (tmp_path / name).write_bytes(data)
    with refusing(SystemExit, words, name if "bad" in name else str(tmp_path)):
        programs.run_program("dcgan", "plain", [*SMALL, "--data", tmp_path])


def test_a_size_that_no_layers_make():
    with refusing(SystemExit, "--imageSize 24"):
        programs.run_program("dcgan", "plain", [*SMALL, "--imageSize", 24])


def test_the_edits_are_few_and_in_the_readme():
    programs.check_edits("dcgan")


@pytest.mark.every("it starts the command of the README, as the test of cifar does")
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    "config",
    ["ds_config.json", "gan_deepspeed_config.json"],
)
def test_the_command_of_the_readme(config):
    text = programs.launch("dcgan", "--deepspeed", "--deepspeed_config", config, "--niter", 1, "--images", 64)
    assert text.count("[0/1][0/") == 1 and "Loss_D: " in text

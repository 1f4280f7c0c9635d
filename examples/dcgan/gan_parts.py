"""Parts of both DCGAN programs: the images, the networks and the flags.

A folder of images has PPM files (P6), which this file reads itself, or PNG and JPEG files, for which Pillow is needed.
Without a folder the program makes images: a disc in front of another colour.
"""

import argparse
import os
import re

import torch
import torch.nn as nn
import torch.nn.functional as F

PPM = re.compile(rb"P6(?:\s+|\s+#[^\n]*\n\s*)(\d+)\s+(\d+)\s+255\s")


def read_ppm(path):
    """The pixels (height, width, 3) of a binary PPM file."""
    with open(path, "rb") as file:
        data = file.read()
    head = PPM.match(data)
    width, height = map(int, head.groups()) if head else (0, 0)
    if not head or not width * height or len(data) < head.end() + 3 * width * height:
        raise SystemExit(f"{path}: this is not a whole PPM file of the form P6 with values up to 255")
    pixels = torch.frombuffer(bytearray(data), dtype=torch.uint8, count=3 * width * height, offset=head.end())
    return pixels.view(height, width, 3)


def read_with_pillow(path):
    """The pixels (height, width, 3) of an image file that Pillow can read."""
    try:
        from PIL import Image
    except ImportError:
        raise SystemExit(f"{path}: the package Pillow reads PNG and JPEG, and it is missing; use PPM files") from None
    try:
        image = Image.open(path).convert("RGB")
    except OSError as error:
        raise SystemExit(f"{path}: Pillow cannot read this image: {error}") from None
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)


READERS = {".ppm": read_ppm, **dict.fromkeys((".png", ".jpg", ".jpeg"), read_with_pillow)}


class Folder(torch.utils.data.Dataset):
    """The images in a folder and in the folders in it, with values from -1 to 1 and ``size`` pixels in both
    directions. The longer side is cut."""

    def __init__(self, root, size):
        found = (os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names)
        self.paths, self.size = sorted(p for p in found if os.path.splitext(p)[1].lower() in READERS), size
        if not self.paths:
            raise SystemExit(f"{root}: --data needs a folder with images ({', '.join(READERS)})")

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        pixels = READERS[os.path.splitext(path)[1].lower()](path)
        side = min(pixels.shape[:2])
        top, left = ((extent - side) // 2 for extent in pixels.shape[:2])
        square = pixels[top : top + side, left : left + side].permute(2, 0, 1)[None].float()
        return F.interpolate(square, size=(self.size, self.size), mode="bilinear", antialias=True)[0] / 127.5 - 1


def made(count, size):
    """Made images as a data set: each has a disc."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.rand(count, *shape, 1, 1, generator=generator)
    rows, columns = torch.arange(size).view(1, 1, size, 1) / size, torch.arange(size).view(1, 1, 1, size) / size
    radius = 0.15 + 0.2 * draw(1)
    disc = ((rows - 0.3 - 0.4 * draw(1)) ** 2 + (columns - 0.3 - 0.4 * draw(1)) ** 2 < radius**2).float()
    return list(disc * draw(3) - (1 - disc) * draw(3))


def data_set(args):
    return Folder(args.data, args.imageSize) if args.data else made(args.images, args.imageSize)


def write_ppm(path, images):
    """Writes images with values from -1 to 1 into one file, below each other."""
    pixels = (images.detach().float().cpu() * 127.5 + 127.5).round().to(torch.uint8)
    pixels = pixels.permute(0, 2, 3, 1).reshape(-1, images.shape[3], 3)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(b"P6\n%d %d\n255\n" % (pixels.shape[1], pixels.shape[0]) + bytes(pixels.flatten().tolist()))


class Network(nn.Module):
    """Layers that run on ``ngpu`` GPUs with torch's data parallelism if there are more than one."""

    def __init__(self, ngpu, layers):
        super().__init__()
        self.ngpu, self.main = ngpu, nn.Sequential(*layers)

    def forward(self, x):
        if x.is_cuda and self.ngpu > 1:
            return nn.parallel.data_parallel(self.main, x, range(self.ngpu))
        return self.main(x)


def halvings(size):
    """The number of times that the layers halve images of this size before they are 4 pixels wide."""
    count = size.bit_length() - 3
    if size != 4 << count or count < 1:
        raise SystemExit(f"--imageSize {size}: use 8, 16, 32, 64 or another power of two")
    return count


def generator(args):
    """The network that makes images of ``nz`` random numbers."""
    count = halvings(args.imageSize)
    widths = [args.ngf << i for i in reversed(range(count))]
    layers = [nn.ConvTranspose2d(args.nz, widths[0], 4, 1, 0, bias=False)]
    for width, following in zip(widths, [*widths[1:], 3]):
        layers += [nn.BatchNorm2d(width), nn.ReLU(True), nn.ConvTranspose2d(width, following, 4, 2, 1, bias=False)]
    return initialized(Network(args.ngpu, [*layers, nn.Tanh()]))


def discriminator(args):
    """The network that tells real images from made ones."""
    widths = [args.ndf << i for i in range(halvings(args.imageSize))]
    layers = [nn.Conv2d(3, widths[0], 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
    for width, following in zip(widths, widths[1:]):
        layers += [nn.Conv2d(width, following, 4, 2, 1, bias=False), nn.BatchNorm2d(following)]
        layers += [nn.LeakyReLU(0.2, inplace=True)]
    layers += [nn.Conv2d(widths[-1], 1, 4, 1, 0, bias=False), nn.Sigmoid(), nn.Flatten(0)]
    return initialized(Network(args.ngpu, layers))


def initialized(network):
    """The network with the weights of the DCGAN paper."""
    for layer in network.main:
        if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.normal_(layer.weight, 0.0, 0.02)
        elif isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.weight, 1.0, 0.02)
    return network


def get_argument_parser():
    parser = argparse.ArgumentParser(description="DCGAN")
    parser.add_argument("--data", "--dataroot", metavar="DIR", help="folder of images; default: made images")
    parser.add_argument("--images", type=int, default=320, help="number of made images (default: 320)")
    parser.add_argument("--batchSize", type=int, default=16, help="input batch size")
    parser.add_argument("--imageSize", type=int, default=64, help="height and width of the images (default: 64)")
    parser.add_argument("--nz", type=int, default=100, help="random numbers for each image")
    parser.add_argument("--ngf", type=int, default=16, help="width of the generator's last layer")
    parser.add_argument("--ndf", type=int, default=16, help="width of the discriminator's first layer")
    parser.add_argument("--niter", type=int, default=5, help="number of epochs")
    parser.add_argument("--lr", type=float, default=0.0002, help="learning rate")
    parser.add_argument("--beta1", type=float, default=0.5, help="beta1 of Adam")
    parser.add_argument("--cuda", action="store_true", help="use a GPU if there is one")
    parser.add_argument("--ngpu", type=int, default=1, help="number of GPUs of plain.py; 0 and 1 are the same")
    parser.add_argument("--outf", metavar="DIR", help="folder for images of each epoch")
    parser.add_argument("--manualSeed", type=int, default=0, help="random seed")
    parser.add_argument("--local_rank", type=int, default=-1, help="local rank passed from distributed launcher")
    return parser

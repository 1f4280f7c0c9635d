"""Parts of both CIFAR-10 programs: the images, the network, the flags and the accuracy.

Images are read from the binary version of CIFAR-10. Its files have records of 3073 bytes: a label from 0 to 9, then
1024 bytes each of red, green and blue. Without such files the program makes images.
"""

import argparse
import glob
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

CLASSES = ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
RECORD = 1 + 3 * 32 * 32


class Images(torch.utils.data.Dataset):
    """Images as bytes with their labels; a sample is an image with values from -1 to 1 and its label."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index].float() / 127.5 - 1, self.labels[index]


def read(paths):
    """The images of binary files. SystemExit with one line if a file is not CIFAR-10."""
    images, labels = [], []
    for path in paths:
        with open(path, "rb") as file:
            data = bytearray(file.read())
        if not data or len(data) % RECORD:
            raise SystemExit(
                f"{path}: record {len(data) // RECORD} has {len(data) % RECORD} bytes instead of {RECORD}: the size of "
                f"a file of CIFAR-10's binary version is a multiple of {RECORD}, and this one has {len(data)} bytes"
            )
        records = torch.frombuffer(data, dtype=torch.uint8).view(-1, RECORD)
        for index in (records[:, 0] > 9).nonzero().flatten()[:1].tolist():
            raise SystemExit(f"{path}: record {index} has the label {records[index, 0].item()}; labels are 0 to 9")
        images.append(records[:, 1:].view(-1, 3, 32, 32))
        labels.append(records[:, 0].long())
    return Images(torch.cat(images), torch.cat(labels))


def made(count, seed):
    """Images in the classes' colours and shapes, with noise that depends on the seed."""
    generator = torch.Generator().manual_seed(0)
    classes = F.interpolate(torch.randn(10, 3, 4, 4, generator=generator), size=32, mode="bilinear")
    labels, noise = torch.arange(count) % 10, generator.manual_seed(seed)
    images = 128 + 25 * classes[labels] + 80 * torch.randn(count, 3, 32, 32, generator=noise)
    return Images(images.clamp(0, 255).to(torch.uint8), labels)


def data_sets(args):
    """Images for training and for the test."""
    if not args.data:
        return made(args.images, seed=1), made(1000, seed=2)
    found = sorted(glob.glob(os.path.join(args.data, "data_batch_*.bin"))), os.path.join(args.data, "test_batch.bin")
    if not found[0] or not os.path.exists(found[1]):
        raise SystemExit(f"{args.data}: --data needs a folder with data_batch_1.bin (and more) and test_batch.bin")
    return read(found[0]), read(found[1:])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.pool = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5), nn.MaxPool2d(2, 2)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x))).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def parser():
    made = argparse.ArgumentParser(description="CIFAR")
    made.add_argument("--data", metavar="DIR", help="folder of CIFAR-10's binary files; default: made images")
    made.add_argument("--images", type=int, default=640, help="number of made images (default: 640)")
    made.add_argument("--with_cuda", action="store_true", help="use a GPU if there is one")
    made.add_argument("--use_ema", action="store_true", help="test an exponential moving average of the weights")
    made.add_argument("-b", "--batch_size", default=32, type=int, help="mini-batch size (default: 32)")
    made.add_argument("-e", "--epochs", default=30, type=int, help="number of total epochs (default: 30)")
    made.add_argument("--local_rank", type=int, default=-1, help="local rank passed from distributed launcher")
    made.add_argument("--log-interval", type=int, default=20, help="steps between two lines with the loss")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--save", metavar="PATH", help="save a checkpoint after each epoch: a file, or a folder of ds.py")
    made.add_argument("--resume", metavar="PATH", help="continue from a checkpoint; --use_ema begins anew")
    return made


def averaged(net):
    """A copy of the network for an exponential moving average of its weights."""
    return torch.optim.swa_utils.AveragedModel(net, avg_fn=lambda average, new, _: 0.95 * average + 0.05 * new)


@torch.no_grad()
def test(net, images, device, show):
    """Prints the accuracy, of all images and of each class, if ``show``. Every rank calls it."""
    net.eval()
    place = device, next(net.parameters()).dtype
    predicted = torch.cat([net(x.to(*place)).argmax(1).cpu() for x, _ in torch.utils.data.DataLoader(images, 100)])
    if show:
        print("GroundTruth: ", " ".join(CLASSES[label] for label in images.labels[:4]))
        print("Predicted: ", " ".join(CLASSES[label] for label in predicted[:4]))
        right = (predicted == images.labels).float()
        print(f"Accuracy of the network on the {len(images)} test images: {100 * right.mean().item():2.0f} %")
        for label in images.labels.unique().tolist():
            share = right[images.labels == label].mean().item()
            print(f"Accuracy of {CLASSES[label]:>7} : {100 * share:2.0f} %")

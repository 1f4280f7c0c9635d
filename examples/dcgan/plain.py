"""Trains a DCGAN with PyTorch alone."""

import os

import torch
import torch.nn as nn

import gan_parts


def main(argv=None):
    """Returns both networks and the two losses of each step."""
    parser = gan_parts.get_argument_parser()
    args = parser.parse_args(argv)
    dataset = gan_parts.data_set(args)
    torch.manual_seed(args.manualSeed)
    netG, netD = gan_parts.generator(args), gan_parts.discriminator(args)
    device = torch.device("cuda:0" if args.cuda and torch.cuda.is_available() else "cpu")
    netG, netD = netG.to(device), netD.to(device)
    optimizerD = torch.optim.Adam(netD.parameters(), lr=args.lr, betas=(args.beta1, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=args.lr, betas=(args.beta1, 0.999))
    sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=1, rank=0)
    dataloader = torch.utils.data.DataLoader(dataset, args.batchSize, sampler=sampler)
    random = torch.Generator().manual_seed(args.manualSeed)
    dtype = next(netD.parameters()).dtype
    criterion = lambda output, wanted: nn.functional.binary_cross_entropy(output, torch.full_like(output, wanted))
    show, losses = args.local_rank <= 0, []

    for epoch in range(args.niter):
        sampler.set_epoch(epoch)
        for i, real in enumerate(dataloader):
            # D: the gradients of real and of made images.
            netD.zero_grad()
            output = netD(real.to(device, dtype))
            errD_real = criterion(output.float(), 1.0)
            errD_real.backward()
            noise = torch.randn(len(real), args.nz, 1, 1, generator=random)
            fake = netG(noise.to(device, dtype))
            output_fake = netD(fake.detach())
            errD_fake = criterion(output_fake.float(), 0.0)
            errD_fake.backward()
            optimizerD.step()
            # G: its images should look real to D.
            netG.zero_grad()
            output_G = netD(fake)
            errG = criterion(output_G.float(), 1.0)
            errG.backward()
            optimizerG.step()
            errD = errD_real.item() + errD_fake.item()
            losses.append((errD, errG.item()))
            if show and i % 10 == 0:
                print(
                    f"[{epoch}/{args.niter}][{i}/{len(dataloader)}] Loss_D: {errD:.4f} Loss_G: {errG.item():.4f} "
                    f"D(x): {output.mean():.4f} D(G(z)): {output_fake.mean():.4f} / {output_G.mean():.4f}"
                )
        if show and args.outf:
            gan_parts.write_ppm(os.path.join(args.outf, f"fake_samples_epoch_{epoch:03d}.ppm"), fake)
    return {"netG.": netG, "netD.": netD}, losses


if __name__ == "__main__":
    main()

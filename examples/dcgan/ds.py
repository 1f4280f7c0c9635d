"""Trains a DCGAN with DeepSpeed."""

import os

import torch
import torch.nn as nn

import deepspeed
import gan_parts


def main(argv=None):
    """Returns both networks and the two losses of each step."""
    parser = gan_parts.get_argument_parser()
    deepspeed.add_config_arguments(parser).set_defaults(ngpu=0)
    args = parser.parse_args(argv)
    dataset = gan_parts.data_set(args)
    torch.manual_seed(args.manualSeed)
    netG, netD = gan_parts.generator(args), gan_parts.discriminator(args)
    optimizerD = torch.optim.Adam(netD.parameters(), lr=args.lr, betas=(args.beta1, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=args.lr, betas=(args.beta1, 0.999))
    model_engineD, optimizerD, dataloader, _ = deepspeed.initialize(
        args=args, model=netD, model_parameters=netD.parameters(), optimizer=optimizerD, training_data=dataset
    )
    model_engineG, optimizerG, _, _ = deepspeed.initialize(
        args=args, model=netG, model_parameters=netG.parameters(), optimizer=optimizerG
    )
    device = deepspeed.get_accelerator().device_name(model_engineD.local_rank)
    random = torch.Generator().manual_seed(args.manualSeed + model_engineD.global_rank)
    dtype = next(netD.parameters()).dtype
    criterion = lambda output, wanted: nn.functional.binary_cross_entropy(output, torch.full_like(output, wanted))
    show, losses = args.local_rank <= 0, []

    for epoch in range(args.niter):
        for i, real in enumerate(dataloader):
            # D: the gradients of real and of made images.
            output = model_engineD(real.to(device, dtype))
            errD_real = criterion(output.float(), 1.0)
            model_engineD.backward(errD_real)
            noise = torch.randn(len(real), args.nz, 1, 1, generator=random)
            fake = model_engineG(noise.to(device, dtype))
            output_fake = model_engineD(fake.detach())
            errD_fake = criterion(output_fake.float(), 0.0)
            model_engineD.backward(errD_fake)
            model_engineD.step()
            # G: its images should look real to D.
            netD.requires_grad_(False)
            output_G = model_engineD(fake)
            errG = criterion(output_G.float(), 1.0)
            model_engineG.backward(errG)
            model_engineG.step()
            netD.requires_grad_(True)
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

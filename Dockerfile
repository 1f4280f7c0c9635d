# An image with this package on Debian's torch, on the CPU:  docker build -t deepspeed .
# For GPUs start from an image that brings a CUDA build of torch instead (--build-arg BASE=...), with `python3` on PATH.
ARG BASE=debian:12
FROM ${BASE}
COPY . /opt/deepspeed
WORKDIR /opt/deepspeed
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends bash make openssh-client pdsh \
    && make install \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/deepspeed/.venv/bin:${PATH}
WORKDIR /workspace
ENTRYPOINT []
CMD ["ds_report"]

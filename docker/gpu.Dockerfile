# dccot on NVIDIA GPUs, every package at its locked version with its checksum; CUDA's libraries come with torch, the driver from the host.
#   docker build -f docker/gpu.Dockerfile -t dccot:gpu .
#   docker run --rm --gpus all --shm-size 16g -v "$PWD/runs:/work/runs" dccot:gpu gpu-check
#   docker run --rm --gpus all --shm-size 16g -v "$PWD/runs:/work/runs" --entrypoint torchrun dccot:gpu \
#     --standalone --nproc_per_node 8 -m dccot.pipeline configs/paper_published_sft.yaml
FROM python:3.11-slim-bookworm
# g++ compiles what torch.compile and Triton generate
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ libnuma1 \
 && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY requirements/ /opt/dccot/requirements/
RUN pip install --no-deps --require-hashes -r /opt/dccot/requirements/gpu.lock
COPY . /opt/dccot/
RUN pip install --no-deps --no-build-isolation /opt/dccot
RUN useradd --create-home dccot && install -d -o dccot /work
USER dccot
WORKDIR /work
EXPOSE 8000
ENTRYPOINT ["dccot"]
CMD ["--help"]

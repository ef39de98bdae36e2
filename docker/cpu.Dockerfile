# dccot on machines without a GPU, every package at its locked version with its checksum.
#   docker build -f docker/cpu.Dockerfile -t dccot:cpu .
#   docker run --rm -p 127.0.0.1:8000:8000 -v "$PWD/runs:/work/runs" dccot:cpu serve runs/demo/stage4 --host 0.0.0.0
FROM python:3.11-slim-bookworm
# g++ compiles what torch.compile and Triton generate; libnuma is vLLM's
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ libnuma1 \
 && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements/ /opt/dccot/requirements/
RUN pip install --no-deps --require-hashes --extra-index-url https://download.pytorch.org/whl/cpu \
      -r /opt/dccot/requirements/torch-cpu.lock \
 && pip install --no-deps --require-hashes -r /opt/dccot/requirements/cpu.lock
COPY . /opt/dccot/
RUN pip install --no-deps --no-build-isolation /opt/dccot
RUN useradd --create-home dccot && install -d -o dccot /work
USER dccot
WORKDIR /work
EXPOSE 8000
ENTRYPOINT ["dccot"]
CMD ["--help"]

# Outlast with all that `outlast train` needs.
#
#   docker build --build-arg TORCH_FLAGS="--index-url <PyTorch's index of CPU wheels>" -t outlast .
#   docker build -t outlast:cuda .                  # torch's default wheels bring CUDA; run it with --gpus all
#   docker run --rm --shm-size=1g --user "$(id -u):$(id -g)" -v "$PWD/runs:/training/runs" outlast train
FROM python:3.11-slim

# Triton and torch.compile compile at run time.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/outlast
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY src src

ARG TORCH_FLAGS=""
# torch goes first and pinned: with it in place nothing that follows asks for another build of it.
RUN pip install --no-cache-dir $TORCH_FLAGS "$(grep '^torch==' constraints.txt)" \
    && pip install --no-cache-dir --constraint constraints.txt '.[all]'

WORKDIR /training
ENTRYPOINT ["outlast"]
CMD ["--help"]

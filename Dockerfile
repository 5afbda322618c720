# The project on NVIDIA's PyTorch image, which brings CUDA 13, CPython 3.12, and NVIDIA's own builds of torch,
# Transformer Engine, apex and FlashAttention. Those stay as they are: of requirements.lock only what the image lacks is
# installed. Downloads packages, no weights and no data.
#
#   docker build -t hybridflow .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 -v $PWD/runs:/workspace/hybridflow/runs hybridflow \
#       hybridflow train launch/recipes/h200-1gpu.yaml

# 26.03 is the release with torch 2.11, the version that sglang-kernel in requirements.lock is built for.
FROM nvcr.io/nvidia/pytorch:26.03-py3

WORKDIR /workspace/hybridflow
COPY requirements.txt requirements-dev.txt requirements.lock requirements-kubernetes.lock pyproject.toml README.md ./
COPY launch/image_requirements.py launch/

# --no-deps: the lock is complete, and nothing may pull a second torch in beside the image's.
# The image's own constraints would refuse the lock's newer pins of small packages, so they are set aside.
RUN python launch/image_requirements.py requirements.lock > /tmp/missing.txt \
    && PIP_CONSTRAINT= pip install --no-cache-dir --no-deps --require-hashes -r /tmp/missing.txt \
    && python -c "import apex, torch, transformer_engine.pytorch; assert 'nv' in torch.__version__, torch.__version__"

# docker build --build-arg KUBERNETES=1: what KubeRay asks of Ray. Ray starts its agents and a dashboard where it is there,
# which listen on all interfaces: for pods alone.
ARG KUBERNETES=
RUN if [ -n "$KUBERNETES" ]; then \
        python launch/image_requirements.py requirements-kubernetes.lock > /tmp/missing.txt \
        && PIP_CONSTRAINT= pip install --no-cache-dir --no-deps --require-hashes -r /tmp/missing.txt; \
    fi

COPY . .
RUN PIP_CONSTRAINT= pip install --no-cache-dir --no-deps --no-build-isolation --editable .

CMD ["hybridflow", "--help"]

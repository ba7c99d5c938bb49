# The server with the page, for CPUs: docker build --tag lookahead .
# For GPUs of NVIDIA:                 docker build --tag lookahead --build-arg TORCH=cu130 .
# With more packages:                 docker build --tag lookahead --build-arg EXTRA='ray[serve]' .
ARG BASE=debian:trixie-slim
FROM ${BASE}
ARG TORCH=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/${TORCH}

# On GPUs Triton compiles the kernel of token trees, with a C compiler and Python's headers.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3-venv $([ "$TORCH" = cpu ] || echo gcc libc6-dev python3-dev) \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/lookahead \
 && useradd --uid 1000 --create-home lookahead \
 && install --directory --owner lookahead /data /models
ENV PATH=/opt/lookahead/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# Layers in the order of how seldom they change.
WORKDIR /source
COPY constraints.txt ./
RUN pip install --constraint constraints.txt --index-url "$TORCH_INDEX" torch
COPY pyproject.toml README.md LICENSE ./
COPY src src
ARG EXTRA=
RUN pip install --constraint constraints.txt '.[serve]' $EXTRA

USER lookahead
WORKDIR /home/lookahead
# Loops are compiled now, so that no request waits for them.
RUN lookahead warm-up

# What the drafts learned of a model's predictions lasts beyond the container.
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=10s --start-period=300s --retries=3 \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["lookahead", "serve", "--host", "0.0.0.0"]
# Of the demo model; for another one give both options to `docker run`: --model /models/NAME --memory /data/NAME
CMD ["--memory", "/data/demo"]

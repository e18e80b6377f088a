# An NVIDIA host: docker build -f deploy/images/cuda.Dockerfile -t registry.example/jaxhet-cuda:0.2.0 .
# The NVIDIA libraries are packages of pip; the driver is the host's (NVIDIA Container Toolkit).
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ libc6-dev
COPY . /src
RUN pip wheel --no-deps -c /src/constraints.txt -C cmake.define.JAXHET_UNITY=ON -w /wheels /src

FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends libibverbs1 ibverbs-providers libssl3 && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
COPY constraints.txt /constraints.txt
RUN pip install --no-cache-dir -c /constraints.txt /wheels/*.whl "jax[cuda13]"
COPY deploy /opt/jaxhet/deploy
# Your program: COPY train.py /app/
WORKDIR /app

# An AMD host: docker build -f deploy/images/rocm.Dockerfile -t registry.example/jaxhet-rocm:0.2.0 .
# Not run on AMD hardware. ROCM names an image with ROCm 7 on Ubuntu 24.04, whose Python is 3.12.
ARG ROCM=rocm/dev-ubuntu-24.04:7.0-complete
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ libc6-dev
COPY . /src
RUN pip wheel --no-deps -c /src/constraints.txt -C cmake.define.JAXHET_UNITY=ON -w /wheels /src

FROM $ROCM
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv libibverbs1 ibverbs-providers libssl3 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
COPY --from=build /wheels /wheels
COPY constraints.txt /constraints.txt
RUN pip install --no-cache-dir -c /constraints.txt /wheels/*.whl jax-rocm7-plugin jax-rocm7-pjrt
COPY deploy /opt/jaxhet/deploy
# Your program: COPY train.py /app/
WORKDIR /app

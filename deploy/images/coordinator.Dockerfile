# The coordinator: docker build -f deploy/images/coordinator.Dockerfile -t registry.example/jaxhet-coordinator:0.2.0 .
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ libc6-dev
COPY . /src
RUN pip wheel --no-deps -c /src/constraints.txt -C cmake.define.JAXHET_UNITY=ON -w /wheels /src

FROM python:3.12-slim
COPY --from=build /wheels /wheels
COPY constraints.txt /constraints.txt
RUN pip install --no-cache-dir -c /constraints.txt /wheels/*.whl

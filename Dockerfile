# docker build -t lipaudit .                                       for CPUs
# docker build -t lipaudit --build-arg TORCH_BACKEND=cu130 .       for GPUs with CUDA 13.0
# docker run --rm -v "$PWD:/work" --user "$(id -u)" -e HOME=/tmp lipaudit audit demo
FROM python:3.13-slim
# Whatever `uv pip install --torch-backend` takes.
ARG TORCH_BACKEND=cpu
ENV UV_SYSTEM_PYTHON=1 UV_NO_CACHE=1
RUN pip install --no-cache-dir "uv>=0.9"
# torch is most of the image. Its layer stays when lipaudit changes.
RUN uv pip install --torch-backend "$TORCH_BACKEND" "torch>=2.8" "torchvision>=0.23"
COPY . /src
RUN uv pip install --torch-backend "$TORCH_BACKEND" /src
RUN useradd --create-home lipaudit && install -d -o lipaudit /work
USER lipaudit
WORKDIR /work
ENTRYPOINT ["lipaudit"]
CMD ["--help"]

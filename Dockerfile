# For a DGX Spark (GB10, aarch64) and an H100 or H200 (x86-64). The build needs no GPU; torch brings the CUDA libraries.
#
#     docker build -t unsloth-dgx-spark .
#     docker run --init --gpus=all --ipc=host -v $(pwd):$(pwd) -w $(pwd) unsloth-dgx-spark [COMMAND]
FROM nvidia/cuda:13.0.2-base-ubuntu24.04

# Triton needs gcc and Python.h to compile its launchers at run time. git records the commit of a run.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates gcc git libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/gpt_2048_rl
COPY setup.sh pyproject.toml docker-entrypoint.sh ./
RUN DEVICE=cuda ./setup.sh && rm -rf /root/.cache

ENV PATH=/opt/gpt_2048_rl/.venv/bin:$PATH
ENTRYPOINT ["/opt/gpt_2048_rl/docker-entrypoint.sh"]
CMD ["python", "gpt_2048_rl.py"]

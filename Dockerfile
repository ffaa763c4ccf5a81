# For a GB10 (aarch64) and for an H100 or H200 (x86-64); the build needs no GPU, the CUDA libraries come with torch.
#
#     docker build -t unsloth-dgx-spark .
#     docker run --gpus=all --ipc=host -v $(pwd):$(pwd) -w $(pwd) unsloth-dgx-spark [COMMAND]
FROM nvidia/cuda:13.0.2-base-ubuntu24.04

# gcc and Python.h are for Triton, which compiles its launchers on the spot; git for the record of what was run.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates gcc git libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/gpt_2048_rl
COPY setup.sh pyproject.toml docker-entrypoint.sh ./
RUN DEVICE=cuda ./setup.sh && rm -rf /root/.cache

ENV PATH=/opt/gpt_2048_rl/.venv/bin:$PATH
ENTRYPOINT ["/opt/gpt_2048_rl/docker-entrypoint.sh"]
CMD ["python", "gpt_2048_rl.py"]

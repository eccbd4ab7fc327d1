# SGLang's published image, plus sgl-shift. Nothing else in the image changes: the wheel needs what is already there.
#   docker build -t sglang-shift . && docker run --gpus all ... sglang-shift \
#       python3 -m sgl_shift.launch_server --model-path ... --tp-size 8 --sp-size 8
ARG SGLANG_IMAGE=lmsysorg/sglang:v0.5.23
FROM ${SGLANG_IMAGE}
COPY . /tmp/sgl-shift
RUN pip install --no-cache-dir --no-deps /tmp/sgl-shift && rm -rf /tmp/sgl-shift \
    && python3 -c "from sgl_shift_patches import registry; import sglang; assert sglang.__version__ == registry.SGLANG_VERSION"

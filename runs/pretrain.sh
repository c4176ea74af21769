#!/bin/sh
# Pretrain a small Llama on the bytes of Python's standard library, on 8 simulated devices: 87 s of 2 cores.
#
#   sh runs/pretrain.sh [options of `meshwright train`, as --dry-run]
#
# Expected, with the sources of Python 3.11.7:
#
#   step   1   50  100  200  300
#   loss 5.74 2.30 2.03 1.72 1.50
#
set -eu
meshwright train tiny \
    --on cpu:8 --mesh fsdp=2,tp=4 --batch 16 --seq-len 128 \
    --steps 300 --lr-schedule wsd --optimizer muon --learning-rate 0.005 \
    -o runs/pretrain "$@"

#!/bin/sh
# Preference tuning of what runs/pretrain.sh made: of each word of a licence, capitals are preferred to small letters.
#
#   sh runs/pretrain.sh && sh runs/dpo.sh
#
# Expected:
#
#   step    1    20    40    60
#   loss 0.69 0.041 0.006 0.004
#
set -eu
[ -d runs/pretrain-hf ] || meshwright export runs/pretrain runs/pretrain-hf
LC_ALL=C tr -cs 'A-Za-z' '\n' < LICENSE | LC_ALL=C sort -u | LC_ALL=C awk 'length($1) > 3 {
    printf "{\"prompt\": \"%s: \", \"chosen\": \"%s\", \"rejected\": \"%s\"}\n", $1, toupper($1), tolower($1)
}' > runs/pairs.jsonl
meshwright train runs/pretrain-hf \
    --on cpu:8 --mesh fsdp=8 --batch 16 --seq-len 64 \
    --objective dpo --data runs/pairs.jsonl --learning-rate 0.0003 \
    --steps 60 -o runs/dpo "$@"

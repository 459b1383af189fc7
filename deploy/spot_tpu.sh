#!/usr/bin/env bash
# Runs a command on all hosts of a queued spot TPU slice, and again on the next
# slice whenever one is taken away, until the command is done or fails by itself:
#
#   ZONE=us-central2-b ACCELERATOR_TYPE=v4-32 RUNTIME_VERSION=tpu-ubuntu2204-base \
#     deploy/spot_tpu.sh NAME SETUP COMMAND
#
# SETUP prepares a new machine. Environment: TIER defaults to --spot; empty, it asks
# for a slice on demand. POLL_SECONDS is the time between polls, 30 by default.
set -euo pipefail
name=$1 setup=$2 command=$3
poll=${POLL_SECONDS:-30}

queue() { gcloud compute tpus queued-resources "$@" --zone="$ZONE" --quiet; }
drop() { queue delete "$name" --force; }
on_all() {
  gcloud compute tpus tpu-vm ssh "$name" --zone="$ZONE" --worker=all --quiet \
    --command="$1"
}
# Sets `now` to the state of the request; exits after 20 polls without an answer.
look() {
  for _ in {1..20}; do
    now=$(queue describe "$name" --format='value(state.state)') && return
    sleep "$poll"
  done
  echo "gcloud does not say what became of $name: look for it, delete it" >&2
  exit 1
}
# Waits for ssh, which is up later than the slice.
reach() {
  for _ in {1..10}; do
    on_all true && return
    sleep "$poll"
  done
  return 1
}
# Succeeds if the slice is still there some time after its last command: a slice
# that is taken away stops answering before its state says so.
is_there() {
  for _ in 1 2 3 4; do
    sleep "$poll"
    look
    [ "$now" = ACTIVE ] || return 1
  done
}

while true; do
  queue create "$name" --node-id="$name" ${TIER---spot} \
    --accelerator-type="$ACCELERATOR_TYPE" --runtime-version="$RUNTIME_VERSION"
  while look; [ "$now" != ACTIVE ]; do
    case $now in
      FAILED) echo "the request for $name has failed" >&2; drop; exit 1 ;;
      SUSPEND*) break ;;
    esac
    sleep "$poll"
  done
  if [ "$now" = ACTIVE ]; then
    if reach && on_all "$setup" && on_all "$command"; then
      drop
      exit 0
    elif is_there; then
      echo "the command has failed, and $name is still there: delete it" >&2
      exit 1
    fi
  fi
  echo "$name was taken away: waiting for the next" >&2
  drop
done

#!/usr/bin/env bash
# The relay: one build that stops at step 20 of its tune and is finished by another engine, process or machine.
# Written for bash 3.2, which macOS ships. Any exit code of spill other than 0 becomes the exit code of this script.
set -euo pipefail

SPILL=${SPILL:-spill}
QUESTION="A stranger grabbed my card out of my jacket in the cinema, what now?"

usage() {
    cat <<USAGE
usage: relay.sh [--two-machines] [--state URI] [--engine-first NAME] [--engine-second NAME]

Builds this folder in two halves, once more in one go, and shows both scores side by side.

  --two-machines        do the first half here, then print how another machine finishes it
  --state URI           where the build is kept: a path, s3://, gs:// or az:// (default: relay-state in this folder)
  --engine-first NAME   engine of the first half (default: the best one available here)
  --engine-second NAME  engine of the second half (default: another available one, else the first again)

The environment variable SPILL names the spill command (default: spill).
USAGE
}

misused() {
    printf 'relay.sh: %s\n' "$1" >&2
    usage >&2
    exit 2
}

# The words as a shell would read them again.
quoted() {
    local word line=""
    for word in "$@"; do
        case $word in
            "" | *[!A-Za-z0-9_./:@%+=,-]*) word="'$(printf '%s' "$word" | sed "s/'/'\\\\''/g")'" ;;
        esac
        line="$line $word"
    done
    printf '%s' "${line# }"
}

# Ends the relay with the exit code given; what spill had to say stands above.
halt() {
    case $1 in
        75 | 130 | 143) printf '\nStopped. What is done is saved; this goes on from there:\n  %s\n' "$again" >&2 ;;
        *) printf '\nrelay.sh: ended with exit code %s. This tries again, and skips what is done:\n  %s\n' "$1" "$again" >&2 ;;
    esac
    exit "$1"
}

announce() {
    number=$((number + 1))
    printf '\n%s[%d/%d] %s%s\n' "$bold" "$number" "$steps" "$1" "$plain"
}

# run MACHINE COMMAND...: shows the command and runs it under that machine name; an empty name leaves the real one.
run() {
    local machine=$1 code=0
    shift
    printf '      $ %s\n' "$(quoted "$@")"
    if [ -n "$machine" ]; then
        SPILL_MACHINE=$machine "$@" || code=$?
    else
        "$@" || code=$?
    fi
    if [ "$code" -eq 0 ]; then code=$interrupted; fi
    if [ "$code" -ne 0 ]; then halt "$code"; fi
}

again=$(quoted "$0" "$@")
folder=$(dirname "$0")
state=$folder/relay-state
first=""
second=""
two_machines=no
while [ $# -gt 0 ]; do
    case $1 in
        --two-machines) two_machines=yes ;;
        --state | --engine-first | --engine-second)
            if [ -z "${2:-}" ]; then misused "$1 needs a value"; fi
            case $1 in
                --state) state=$2 ;;
                --engine-first) first=$2 ;;
                --engine-second) second=$2 ;;
            esac
            shift
            ;;
        -h | --help)
            usage
            exit 0
            ;;
        *) misused "unknown argument: $1" ;;
    esac
    shift
done
if [ "$state" != / ]; then state=${state%/}; fi
reference=$state-reference

bold=""
plain=""
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ] && [ "${TERM:-dumb}" != dumb ]; then
    bold=$(printf '\033[1m')
    plain=$(printf '\033[0m')
fi

if ! command -v "$SPILL" >/dev/null 2>&1; then
    printf 'relay.sh: the command %s is not there: pip install spill-core spill-engine-torch, or set SPILL to its path\n' \
        "$(quoted "$SPILL")" >&2
    exit 127
fi

# Ctrl-C reaches spill as well, which saves and then says 130. With a handler here, bash waits for that instead of dying
# first; a signal that spill did not see, because it was just finishing, stops the relay before its next step.
interrupted=0
trap 'interrupted=130' INT
trap 'interrupted=75' TERM

number=0
names=$("$SPILL" doctor --names) || halt $?
if [ "$interrupted" -ne 0 ]; then halt "$interrupted"; fi
if [ -z "$first" ]; then first=${names%%$'\n'*}; fi
if [ -z "$first" ]; then
    printf 'relay.sh: no engine is available here; this says why: %s\n' "$(quoted "$SPILL" doctor)" >&2
    exit 1
fi

if [ "$two_machines" = yes ]; then
    steps=2
    case $state in
        *://*)
            there=$state
            copy="nothing: the state is at $state"
            ;;
        *)
            there=./$(basename "$state")
            copy="$(quoted "$state")    (all it needs: the folder's files are kept in it)"
            ;;
    esac
    printf 'One build, two machines: the first half here with %s, the second wherever you like.\n' "$first"
    announce "this machine ($first): the exam before the tune, then the tune up to step 20"
    run "" "$SPILL" build "$folder" --state "$state" --stop-after tune:20 --engine "$first"
    announce "the other machine: takes over where this one stopped, with whatever engine it has"
    printf '      copy   %s\n' "$copy"
    if [ -n "$second" ]; then
        printf '      run    %s\n' "$(quoted spill resume "$there" --engine "$second")"
    else
        printf '      run    %s\n' "$(quoted spill resume "$there")"
    fi
    printf '      look   %s\n' "$(quoted spill table "$there")"
    printf '\nThis half is done, in %d s.\n' "$SECONDS"
    exit 0
fi

for name in $names; do
    if [ -z "$second" ] && [ "$name" != "$first" ]; then second=$name; fi
done
if [ -z "$second" ]; then
    second=$first
    how="a second process, for lack of another engine here"
elif [ "$second" = "$first" ]; then
    how="the same engine in a second process"
else
    how="another engine on the same machine"
fi

steps=5
printf 'One build, two runners, and the same build in one go to compare.\n\n'
printf '  folder   %s\n' "$folder"
printf '  state    %s\n' "$state"
printf '  alpha    %s, up to step 20 of the tune\n' "$first"
printf '  beta     %s, from there to the end: %s\n' "$second" "$how"
printf '\nalpha and beta are names for two runs on this machine; --two-machines hands over to a real second one.\n'

announce "alpha ($first): the exam before the tune, then the tune up to step 20"
run alpha "$SPILL" build "$folder" --state "$state" --stop-after tune:20 --engine "$first"

announce "beta ($second, $how): takes over where alpha stopped"
run beta "$SPILL" resume "$folder" --state "$state" --engine "$second"

announce "reference ($first): the same build in one go"
run alpha "$SPILL" build "$folder" --state "$reference" --engine "$first"

announce "the table: who made each stage, its score, and the reference's"
run "" "$SPILL" table "$state" --reference "$reference"

announce "a question that is in neither file, for the tuned model"
run "" "$SPILL" ask "$folder" --state "$state" "$QUESTION"

printf '\n%sThe relay is done, in %d s.%s Next:\n\n' "$bold" "$SECONDS" "$plain"
printf '  %s\n      a question of your own\n' "$(quoted "$SPILL" ask "$folder" --state "$state" "Why is my transfer not there yet?")"
printf '  %s\n      the tuned adapter, for other tools\n' "$(quoted "$SPILL" export "$folder" --state "$state" --out ./adapter)"
printf '  %s\n      the same with a real second machine\n' "$(quoted "$0" --two-machines --state ./handover)"
printf '  %s\n      to start anew, delete %s and %s first\n' "$again" "$state" "$reference"

#!/usr/bin/env bash
# A run on several hosts, started over ssh:   launch/ssh.sh [OPTION ...] HOSTFILE RECIPE [key=value ...]
#
# HOSTFILE has one host a line, the first of which runs the driver; "#" begins a comment:
#     [USER@]NAME [role=train|rollout|reward] [interface=NAME] [cpu_slots=N] [spare]
# A spare host stands by, and takes the place of one that is lost (--max-restarts). One with a role replaces only its like.
#
#   --dir DIR          where every host runs it (HYBRIDFLOW_DIR; the current directory)
#   --python PATH      interpreter on every host (HYBRIDFLOW_PYTHON; the python3 that is found here)
#   --port N           at which the first host listens for the others (HYBRIDFLOW_PORT; 29400)
#   --head NAME        name or address of the first host for the others (its name in HOSTFILE)
#   --env NAME[=VALUE] environment variable for every host, not for secrets; may be repeated
#   --ssh-config FILE  configuration of ssh
#   --max-restarts N   starts of the run after failures, with resume=auto, on the hosts that are left and with spare ones
#   --doctor           only look at the hosts, and say what is wrong
#   --dry-run          print what would be started
#
# HYBRIDFLOW_SSH has the command of ssh with options ("ssh -p 2222"). It must reach every host without asking anything.
# Each line of output begins with its host's name. Ctrl-C and SIGTERM end the run on all hosts in an orderly way, a
# second one does not wait for that; when this script is killed, the run ends too. SIGUSR1 saves a checkpoint. Exit code:
# that of the first host.
set -uo pipefail

readonly reached_s=60 # until every host has answered
readonly others_s=30  # that the others get when a host has failed
readonly end_s=150    # that they get to end when they are told to
readonly listed=8     # lines about hosts at most

say() { printf 'ssh.sh: %s\n' "$*" >&2; }

refuse() {
    say "$*"
    exit 2
}

usage() { sed -n '2,/^set /{s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"; }

# A word as any shell reads it.
quoted() {
    if [[ $1 =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then printf %s "$1"; else printf "'%s'" "${1//\'/\'\\\'\'}"; fi
}

quoted_words() {
    local word text=
    for word; do text+=" $(quoted "$word")"; done
    printf '%s' "${text# }"
}

# A pipe of which this process has both ends, in `$made`.
make_pipe() {
    mkfifo -m 600 "$scratch/pipe" || exit 1
    exec {made}<>"$scratch/pipe"
    rm "$scratch/pipe"
}

parse_options() {
    directory=${HYBRIDFLOW_DIR:-$PWD} python=${HYBRIDFLOW_PYTHON:-} port=${HYBRIDFLOW_PORT:-29400}
    head='' dry_run=0 environment=() words=() command=train restarts=0
    read -ra ssh <<<"${HYBRIDFLOW_SSH:-ssh}"
    while (($#)); do
        case $1 in
        --help | -h) usage && exit 0 ;;
        --dry-run) dry_run=1 ;;
        --doctor) command=doctor ;;
        --dir | --python | --port | --head | --env | --ssh-config | --max-restarts)
            (($# > 1)) || refuse "$1 needs a value (see --help)"
            case $1 in
            --dir) directory=$2 ;;
            --python) python=$2 ;;
            --port) port=$2 ;;
            --head) head=$2 ;;
            --max-restarts) restarts=$2 ;;
            --ssh-config) ssh+=(-F "$2") ;;
            --env) add_variable "$2" ;;
            esac
            shift
            ;;
        -*) refuse "$1: no such option (see --help)" ;;
        *) break ;;
        esac
        shift
    done
    (($# > 1)) || refuse "expected HOSTFILE RECIPE [key=value ...] (see --help)"
    hostfile=$1 recipe=$2
    shift 2
    words=("$@")
    local word
    for word; do
        [[ $word == ?*=* || $word == --track_metrics ]] ||
            refuse "$word: expected a setting such as seed=1 behind the recipe"
    done
    if [[ ! $port =~ ^[1-9][0-9]{0,4}$ ]] || ((port > 65535)); then
        refuse "port $port: expected a number from 1 to 65535"
    fi
    [[ $restarts =~ ^[0-9]{1,6}$ ]] || refuse "--max-restarts $restarts: expected a number"
    [[ $directory == /* ]] || refuse "directory $directory: expected an absolute path, the same on every host"
    [[ -n $python ]] || python=$(command -v python3) || refuse "no python3 is found here: name it with --python"
    command -v "${ssh[0]}" >/dev/null || refuse "${ssh[0]}: no such program (Debian: openssh-client)"
    # What HYBRIDFLOW_SSH and the configuration say of time comes first. A connection that others share would outlive us.
    ssh+=(-T -x -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 -o ServerAliveCountMax=3)
    ssh+=(-o ControlMaster=no -o ControlPath=none)
}

add_variable() {
    local name=${1%%=*}
    [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || refuse "--env $1: expected NAME or NAME=VALUE"
    [[ $name != HYBRIDFLOW_TOKEN ]] || refuse "--env $name: every run gets a new token by itself"
    if [[ $1 == *=* ]]; then
        environment+=("$1")
    else
        [[ -n ${!name+set} ]] || refuse "--env $name: it is not set here; expected NAME=VALUE"
        environment+=("$name=${!name}")
    fi
}

# Fills `hosts` (as ssh is given them), `names` and `options` (of the agents, each a string of plain words), the spare
# ones last.
read_hosts() {
    hosts=() names=() options=()
    local spare_hosts=() spare_names=() spare_options=() spare
    [[ -f $hostfile && -r $hostfile ]] || refuse "host file $hostfile: no such file"
    local -A seen=()
    local line host word number=0
    while IFS= read -r line || [[ -n $line ]]; do
        ((number += 1))
        read -ra line_words <<<"${line%%#*}"
        ((${#line_words[@]})) || continue
        host=${line_words[0]} where="host file $hostfile:$number"
        [[ $host =~ ^([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_:][A-Za-z0-9_.:-]*$ ]] ||
            refuse "$where: $host: expected a host such as node-1 or user@node-1"
        name=${host#*@}
        [[ -z ${seen[$name]+set} ]] || refuse "$where: $name is there already, in line ${seen[$name]}"
        seen[$name]=$number
        option='' spare=0
        for word in "${line_words[@]:1}"; do
            case $word in
            role=train | role=rollout | role=reward) option+=" --role ${word#*=}" ;;
            role=*) refuse "$where: $word: expected role=train, role=rollout or role=reward" ;;
            interface=*)
                [[ $word =~ ^interface=[A-Za-z0-9_.:@-]+$ ]] || refuse "$where: $word: expected interface=NAME"
                option+=" --interface ${word#*=}"
                ;;
            cpu_slots=*)
                [[ $word =~ ^cpu_slots=[1-9][0-9]{0,5}$ ]] || refuse "$where: $word: expected cpu_slots=N"
                option+=" --cpu-slots ${word#*=}"
                ;;
            spare) spare=1 ;;
            *) refuse "$where: $word: expected role=..., interface=..., cpu_slots=... or spare" ;;
            esac
        done
        if ((spare)); then
            spare_hosts+=("$host") spare_names+=("$name") spare_options+=("$option")
        else
            hosts+=("$host") names+=("$name") options+=("$option")
        fi
    done <"$hostfile"
    ((${#hosts[@]})) || refuse "host file $hostfile: it names no host${spare_hosts[0]+ that is not spare}"
    spares=${#spare_hosts[@]}
    if ((spares)); then
        [[ $restarts != 0 || $command == doctor ]] ||
            refuse "host file $hostfile: $spares spare hosts without --max-restarts would never be used"
        hosts+=("${spare_hosts[@]}") names+=("${spare_names[@]}") options+=("${spare_options[@]}")
    fi
    [[ -n $head ]] || head=${names[0]}
    if [[ $head == *:* && $head != \[* ]]; then head="[$head]"; fi
}

# What a host runs, for its login shell. The token is no part of it.
remote_command() {
    local index=$1 agent=()
    ((${#environment[@]} == 0)) || agent+=(env "${environment[@]}")
    agent+=("$python" -m hybridflow agent --stdin --host "$index" --hosts "${#hosts[@]}" --head "$head:$port")
    ((restarts == 0)) || agent+=(--max-restarts "$restarts")
    ((spares == 0)) || agent+=(--spares "$spares")
    # shellcheck disable=SC2206 # plain words
    agent+=(${options[$index]} "$command" "$recipe" ${words[@]+"${words[@]}"})
    printf 'cd %s && exec %s' "$(quoted "$directory")" "$(quoted_words "${agent[@]}")"
}

# Has every host say that it can take part, before any does.
check_hosts() {
    local script answers index line waiting=${#hosts[@]} bad=0 pids=()
    # shellcheck disable=SC2016 # the remote shell's
    script='cd "$1" 2>/dev/null || { echo "no directory $1"; exit 1; }
[ -r "$2" ] || { echo "no recipe $2 in $1"; exit 1; }
command -v "$3" >/dev/null || { echo "no interpreter $3"; exit 1; }
"$3" -c "import hybridflow" 2>/dev/null || { echo "$3 has no hybridflow (--python names another interpreter)"; exit 1; }
echo can take part'
    script="exec /bin/sh -c $(quoted_words "$script" sh "$directory" "$recipe" "$python")"
    make_pipe
    answers=$made
    for index in "${!hosts[@]}"; do
        {
            line=$(timeout -k 5 "$reached_s" "${ssh[@]}" "${hosts[$index]}" "$script" 2>&1 </dev/null | tr -d '\r' |
                grep . | tail -n 1)
            printf '%d %.2000s\n' "$index" "${line:-it says nothing}" >&"$answers"
        } >/dev/null 2>&1 &
        pids+=($!)
    done
    SECONDS=0
    local -A answered=()
    while ((waiting)) && ((SECONDS < reached_s)); do
        read -r -t 1 -u "$answers" index line || continue
        ((waiting -= 1))
        answered[$index]=$line
    done
    for index in "${!hosts[@]}"; do
        line=${answered[$index]:-no answer within $reached_s s}
        [[ $line != "can take part" ]] || continue
        ((bad += 1))
        ((bad > listed)) || say "host $index (${hosts[$index]}): $line"
        kill "${pids[$index]}" 2>/dev/null
    done
    ((bad <= listed)) || say "and $((bad - listed)) more of ${#hosts[@]} hosts"
    exec {answers}>&-
    ((bad == 0)) || exit 2
    wait "${pids[@]}"
}

# Standard input, each line with the host's name before it. Whoever has the byte in the pipe `turn` may write.
prefix() {
    local LC_ALL=C line _
    while IFS= read -r line || [[ -n $line ]]; do
        read -r -t 10 -N 1 -u "$turn" _
        printf '%s: %s\n' "$1" "$line" 2>/dev/null
        printf . >&"$turn"
    done
}

# One host's agent and the two processes that print what it says, in the background.
start_host() {
    local index=$1 own=${to_host[$1]} descriptor
    {
        trap '' INT TERM HUP PIPE USR1 # ssh ends when the agent has, and the agent when it is told to or this script is gone
        exec <&"$own"             # before it is closed for writing: /dev/fd opens the pipe anew, for reading alone
        exec </dev/fd/0
        for descriptor in "${to_host[@]}"; do exec {descriptor}>&-; done
        {
            "${ssh[@]}" "${hosts[$index]}" "$(remote_command "$index")" 2>&1 >&3 3>&- {turn}>&- {ends}>&- |
                prefix "${names[$index]}" >&2 3>&- {ends}>&-
            exit "${PIPESTATUS[0]}"
        } 3>&1 | prefix "${names[$index]}"
        printf '%d %d\n' "$index" "${PIPESTATUS[0]}" >&"$ends"
    } &
    pids[index]=$!
}

tell_all() {
    local descriptor
    for descriptor in "${to_host[@]}"; do printf '%s\n' "$1" >&"$descriptor"; done
}

# shellcheck disable=SC2317 # by traps
on_signal() {
    ((signals += 1))
    if ((signals > 2)); then exit "$2"; fi
    tell_all "$1"
}

# Follows all hosts to their end: `codes` has the exit code of each, `failed` the first that was not 0.
follow() {
    local index code left=${#hosts[@]} deadline=0 told=0
    codes=() failed=0
    while ((left)); do
        if ! read -r -t 1 -u "$ends" index code; then
            for index in "${!pids[@]}"; do # a part of this script that somebody has killed
                kill -0 "${pids[$index]}" 2>/dev/null || printf '%d 255\n' "$index" >&"$ends"
            done
        elif [[ -n ${pids[$index]+set} ]]; then
            unset "pids[$index]"
            ((code != 137)) || code=255 # ssh was killed
            codes[index]=$code
            ((left -= 1))
            ((code == 0 || code == 255 || failed)) || failed=$code
            ((code != 255)) || say "the connection to ${names[$index]} has ended"
            # A run that may be started again goes on without a host, but not without the first one.
            if ((!deadline && (restarts == 0 || index == 0))); then
                deadline=$((SECONDS + (code ? others_s : end_s)))
            fi
        fi
        if ((left && deadline && SECONDS > deadline)); then
            if ((told)); then
                say "not ended within $end_s s: $(for index in "${!pids[@]}"; do printf '%s ' "${names[$index]}"; done)"
                return
            fi
            told=1 deadline=$((SECONDS + end_s))
            say "one host has ended, and $left of ${#hosts[@]} have not: they are told to"
            tell_all TERM
        fi
    done
}

main() {
    ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || refuse "bash $BASH_VERSION: expected at least 4.4"
    parse_options "$@"
    read_hosts
    local index
    if ((dry_run)); then
        for index in "${!hosts[@]}"; do
            printf '%s %s\n' "$(quoted_words "${ssh[@]}" "${hosts[$index]}")" "$(quoted "$(remote_command "$index")")"
        done
        exit 0
    fi

    scratch=$(mktemp -d) || exit 1
    trap 'rm -rf "$scratch"' EXIT
    check_hosts
    to_host=() pids=() signals=0
    for index in "${!hosts[@]}"; do
        make_pipe
        to_host[index]=$made
    done
    make_pipe
    turn=$made
    make_pipe
    ends=$made
    rm -rf "$scratch"
    printf . >&"$turn"

    trap 'on_signal INT 130' INT
    trap 'on_signal TERM 143' TERM HUP
    trap 'tell_all USR1' USR1
    # By builtins of this shell alone: on no command line, in no environment, in no file.
    local token
    token=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
    ((${#token} == 64)) || refuse "/dev/urandom gives no token"
    tell_all "$token"
    token=
    SECONDS=0
    for index in "${!hosts[@]}"; do start_host "$index"; done
    follow
    local code=${codes[0]:-255}
    ((code != 255)) || code=$((failed ? failed : 1))
    exit "$code"
}

main "$@"

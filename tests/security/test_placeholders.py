"""Placeholders of an MLproject's command: no value is ever run, whatever bash or another program would make of it (issue 14)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlflow_batchai.documents.command import translate, variable_names
from mlflow_batchai.documents.mlproject import load_project
from mlflow_batchai.errors import ProjectError

# Each runs `touch MARK` in one place or another.
HOSTILE = [
    "a[$(touch MARK)]",
    "$(touch MARK)",
    "; touch MARK",
    "`touch MARK`",
    "touch MARK",
    "'; touch MARK; '",
    '"; touch MARK; "',
    "\ntouch MARK\n",
    "([$(touch MARK)]=1)",
    "a[$(touch MARK)]=1",
    "e/../;1e touch MARK\n#",
    'system("touch MARK")',
    '__import__("os").system("touch MARK")',
    'BEGIN{system("touch MARK")}',
    "!touch MARK",
    "x(){ touch MARK; };x",
    "${a[$(touch MARK)]}",
]

# fmt: off
BUILTINS = [
    "eval {n}", "eval echo {n}", "cd . && eval {n}", "if true; then eval {n}; fi", "command eval {n}", "builtin eval {n}",
    "command -p eval {n}", "! eval {n}", "time eval {n}", "time -p eval {n}", "coproc eval {n}", "{{ eval {n}; }}", "(eval {n})",
    "while eval {n}; do break; done", "until eval {n}; do break; done", "case x in x) eval {n};; esac", "f() {{ eval {n}; }}; f",
    "trap {n} EXIT", "trap -- {n} 0", "trap {n} DEBUG; true", "trap 'eval {n}' EXIT",
    "trap 'eval \"$BATCHAI_PARAM_n\"' EXIT; : {n}", "source {n}", ". {n}", "source <(echo {n})", ". /dev/stdin <<< {n}",
    "source /dev/fd/0 <<< {n}", "read {n} <<< x", "read -r a {n} <<< x", "read -a {n} <<< x", "mapfile -C {n} -c 1 x <<< y",
    "mapfile {n} <<< x", "readarray -t {n} <<< x", "printf -v {n} x", "printf -v{n} x", "printf {a} {n} x", "printf '{n}' x",
    "command printf -v {n} x", "declare {n}", "declare -i x={n}", "declare -a x={n}", "declare -ia x={n}", "declare -A x={n}",
    "declare -n x={n}; x=1", "declare -p {n}", "typeset {n}=1", "typeset -i x; x={n}", "declare -i x; x={n}",
    "x=(); declare x={n}", "export {n}", "export {n}=1", "export -n {n}", "readonly {n}", "f() {{ local {n}; }}; f",
    "f() {{ local -i x={n}; }}; f", "f() {{ local x=1; local -n y={n}; y=2; }}; f", "unset {n}", "unset -v {n}", "let {n}",
    "let x={n}", "let 'x = {n}'", "test -v {n}", "[ -v {n} ]", "[ ! -v {n} ]", "test -R {n}", "[ {a} {n} ]", "test {a} {n}",
    "[[ -v {n} ]]", "[[ -R {n} ]]", "[[ {n} -eq 1 ]]", "[[ 1 -lt {n} ]]", "[[ ! ( {n} -ge 2 ) ]]", "[[ x == x && {n} -ne 3 ]]",
    "true & wait -n -p {n}", "getopts ab {n}", "getopts {n} x", "coproc {n} {{ true; }}", "alias x={n}",
    "shopt -s expand_aliases; alias x=eval\nx {n}", "complete -W {n} x", "compgen -W {n}", "compgen -C {n}", "compgen -F {n} x",
    "enable -f {n} x", "hash -p {n} ls; ls", "bind -x {n}", "fc -e {n}", "history -s {n}", "jobs -x eval {n}", "exec {n}",
    "command {n}", "builtin {a} {n}", "set {n}", "set -o {n}", 'set -- {n}; eval "$1"', "set -- {n}; (( $1 ))",
    'set -- {n}; unset "$@"',
]

ARITHMETIC = [
    "echo $(( {n} ))", "echo $(( {n} + 1 ))", "(( {n} ))", "(( x = {n} ))", 'echo "$(( (1 + {n}) * 2 ))"', "echo $[ {n} ]",
    "echo $[{n}+1]", "for (( i = 0; i < {n}; i++ )); do break; done", "x[{n}]=1", "x[{n}]+=1", "x=([{n}]=1)", "echo ${{x[{n}]}}",
    'echo "${{x[{n}]}}"', "echo ${{P:{n}}}", "echo ${{P:{n}:2}}", "echo ${{P:0:{n}}}", 'echo "${{P: {n}}}"', "x={n}; (( x ))",
    "x={n}; echo $(( x ))", "x={n}; echo $(( $x ))", "x={n}; echo $[x]", "x={n}; [[ x -eq 1 ]]", "x={n}; [[ $x -eq 1 ]]",
    'x={n}; [[ "$x" -gt 0 ]]', "x={n}; let x", "x={n}; let y=x", "x={n}; echo ${{y[x]}}", "x={n}; y[x]=1", "x={n}; y[$x]=1",
    "x={n}; echo ${{P:x}}", "x={n}; echo ${{P:$x:1}}", "x={n}; y=$x; (( y ))", 'x={n}; y="a$x"; z=$y; echo $(( z ))',
    "x=1; x+={n}; (( x ))", "for x in {n}; do (( x )); done", "x={n} bash -c '(( x ))'", "export x={n}; bash -c '(( x ))'",
    "x={n}; export x; bash -c 'eval \"$x\"'", "x=$(echo {n}); (( x ))", "x=`echo {n}`; (( x ))", "read x <<< {n}; (( x ))",
    "echo {n} | {{ read x; (( x )); }}", "mapfile x <<< {n}; (( x ))", "read <<< {n}; (( REPLY ))", ": ${{x:={n}}}; (( x ))",
    ": ${{x={n}}}; echo $(( x ))", "f() {{ (( $1 )); }}; f {n}", "f() {{ local x=$1; (( x )); }}; f {n}",
    "f() {{ echo $(( ${{1}} )); }}; f {n}", "f() {{ [[ $1 -eq 2 ]]; }}; f {n}", "printf -v x %s {n}; (( x ))",
    "while (( {n} )); do break; done", "if (( 1 + {n} )); then true; fi", ": {n}; (( BATCHAI_PARAM_n ))",
    ": {n}; echo $(( $BATCHAI_PARAM_n ))", "x={n}; declare -i y=x", "x=({n}); (( x ))", "x=({n}); echo $(( ${{x[0]}} ))",
    "x={n}; echo ${{!x}}", 'f() {{ echo "${{!1}}"; }}; f {n}', "x={n}; echo ${{x@P}}", 'echo "${{BATCHAI_PARAM_n@P}}" {n}',
    "(( x[{n}] ))", "[[ x[{n}] -eq 1 ]]", "case $(( {n} )) in x) ;; esac", "cat <<< $(( {n} ))", "true > $(( {n} ))",
]

VARIABLES = [
    "PS4={n}; set -x; true", "PS4={n} bash -xc true", "PROMPT_COMMAND={n} bash -ic true", "BASH_ENV={n} bash -c true",
    "ENV={n} sh -ic true", "IFS={n}; true", "PATH={n}; ls", "PATH={n}:$PATH ls", "LD_PRELOAD={n} ls", "LD_LIBRARY_PATH={n} ls",
    "export BASH_ENV={n}; bash -c true", "export PATH={n}", "env BASH_ENV={n} bash -c true", "env PATH={n} ls",
    "declare -x PS4={n}; bash -xc true", "readonly PS4={n}", "RANDOM={n}", "SECONDS={n}", "OPTIND={n}",
    "SHELLOPTS={n} bash -c true", "BASH_FUNC_ls={n} bash -c ls", "PERL5OPT={n} perl -e 1", "PYTHONSTARTUP={n} python3",
    "NODE_OPTIONS={n} node x.js", "RUBYOPT={n} ruby x.rb", "GIT_SSH_COMMAND={n} git fetch", "EDITOR={n} git commit",
    "PAGER={n} man ls", "LESSOPEN={n} less x", "for PS4 in {n}; do set -x; true; done", "for PATH in {n}; do ls; done",
    ": ${{PS4:={n}}}", "MAKEFLAGS={n} true", "COLUMNS=1 HISTFILE={n} true", "x={n}; PS4=$x; set -x; true",
    "x={n}; export BASH_ENV=$x; bash -c true",
]

SHELLS = [
    "bash -c {n}", "bash -c 'true {n}'", 'bash -c "true {n}"', "sh -c {n}", "sh -ec {n}", "dash -c {n}", "ksh -c {n}",
    "zsh -c {n}", "fish -c {n}", "csh -c {n}", "/bin/bash -lc 'x {n}'", "/usr/bin/env bash -c {n}", "bash -xc {n}",
    "bash -o pipefail -c 'true {n}'", "bash -eo pipefail -c 'true {n}'", "bash -O extglob -c {n}", "bash --norc -c {n}",
    "bash --rcfile x -c {n}", "bash -rcfile x -c {n}", "bash -norc -c {n}", "bash -c -x {n}", "bash -c -- {n}", "bash +x -c {n}", "bash -e -u -c 'true {n}'",
    "bash -c $'true {n}'", "bash -c 'true '{n}", "bash {n}", "bash -x {n}", "bash -c 'eval \"$1\"' _ {n}",
    "bash -c 'eval \"$0\"' {n}", "bash -c '(( $1 ))' _ {n}", "bash -c 'bash -c \"$1\"' _ {n}", "bash -c 'eval \"$@\"' _ {n}",
    "bash -c 'for x; do eval $x; done' _ {n}", 'bash -c "$(echo {n})"', 'bash -c "`echo {n}`"', 'x={n}; bash -c "$x"',
    "x={n}; bash -c $x", "x={n}; eval $x", "x={n}; $x", 'x={n}; "$x" y', 'x={n}; eval "$(echo $x)"', 'eval "$(echo {n})"',
    'eval "$(cat <<< {n})"', "eval `echo {n}`", "bash <<< {n}", "bash -s <<< {n}", "bash - <<< {n}", "bash /dev/stdin <<< {n}",
    "sh < <(echo {n})", "bash <(echo {n})", "echo {n} | bash", "echo {n} | sh -s", "echo {n} | bash -x",
    "echo {n} | tee x | bash", "echo {n} | (cat; true) | sh", "echo {n} | {{ bash; }}", "echo {n} | if true; then bash; fi",
    "{{ echo {n}; }} | bash", "(echo {n}) | env bash", "echo {n} |& bash", "echo {n} | nice sh",
    "for x in {n}; do echo $x; done | sh", ": {n}; cat <<EOF | sh\n$BATCHAI_PARAM_n\nEOF",
    ": {n}; bash <<EOF\n$BATCHAI_PARAM_n\nEOF", ": {n}; bash <<'EOF'\neval \"$BATCHAI_PARAM_n\"\nEOF", "bash > >(sh) <<< {n}",
    "echo {n} | xargs sh -c", "echo {n} | xargs -I X sh -c X", "xargs -I X sh -c {n} <<< y", "xargs {n} <<< y",
    "find . -maxdepth 0 -exec sh -c {n} \\;", "find . -maxdepth 0 -exec {n} \\;", "find . -maxdepth 0 -ok {n} \\;",
    "env bash -c {n}", "env -i bash -c {n}", "env -u X FOO=1 sh -c {n}", "env -S {n}", "env -S 'sh -c {n}'",
    "env --split-string={n}", "timeout 5 bash -c {n}", "timeout -s KILL 5 bash -c {n}", "timeout --signal=KILL 5 sh -c {n}",
    "nice bash -c {n}", "nice -n 5 bash -c {n}", "nohup bash -c {n}", "stdbuf -oL bash -c {n}", "time bash -c {n}",
    "exec bash -c {n}", "exec -a x bash -c {n}", "command bash -c {n}", "setsid bash -c {n}", "ionice -c 3 bash -c {n}",
    "taskset -c 0 bash -c {n}", "numactl -N 0 sh -c {n}", "nice timeout 5 env X=1 bash -c {n}", "! bash -c {n}",
    "sudo sh -c {n}", "sudo -u x bash -c {n}", "su -c {n}", "su x -c {n}", "su - -c 'true {n}'", "runuser -u root -- sh -c {n}",
    "runuser -c {n}", "setpriv --reuid 1 sh -c {n}", "chroot / sh -c {n}", "nsenter -t 1 sh -c {n}", "unshare sh -c {n}",
    "parallel {n} ::: 1", "parallel echo {n} ::: 1", "echo {n} | parallel", "watch {n}", "script -c {n} /dev/null",
    "script -qc 'true {n}' /dev/null", "ssh host {n}", "ssh host echo {n}", "mpirun -np 2 bash -c {n}",
    "horovodrun -np 2 sh -c 'python t.py {n}'", "flock x -c {n}", "srun bash -lc {n}", "sbatch --wrap {n}", "sbatch --wrap={n}",
    "docker run x sh -c {n}", "busybox sh -c {n}", "at now <<< {n}", "tmux new {n}", "x={n}; env A=$x", "x={n}; nice -n $x true",
    "x={n}; timeout $x true", "x={n}; find . $x", "x={n}; sed s/a/b/ $x", "x={n}; tar tf $x", 'x={n}; bash -c "$x" y',
    "x={n}; test $x",
]

PROGRAMS = [
    "perl -e {n}", "perl -E {n}", "perl -ne {n} /dev/null", "perl -we 'print {n}'", "perl -e{n}", "perl -M{n} -e 1",
    "python3 -c {n}", "python -c 'print({n})'", "python3 -uc {n}", "python3 -c{n}", "python3 -W ignore -c {n}",
    "/usr/bin/python3.11 -c {n}", "python3 <<< {n}", "echo {n} | python3", "echo {n} | python3 -", "python3 - <<< {n}",
    "echo {n} | perl", "perl <<< {n}", "ruby -e {n}", "node -e {n}", "node -p {n}", "node --eval {n}", "node --eval={n}",
    "lua -e {n}", "php -r {n}", "R -e {n}", "Rscript -e {n}", "julia -e {n}", "octave --eval {n}", "tclsh {n}", "expect -c {n}",
    "awk {n} /dev/null", "awk '{n}' /dev/null", 'awk "BEGIN {{{{ print {n} }}}}"', "gawk --source {n}", "gawk -e {n}",
    "mawk -f {n}", "awk -v {n} 'BEGIN {{}}'", "sed {n} x", "sed -e {n} x", "sed 's/a/{n}/' /dev/null", 'echo a | sed "s/a/{n}/"',
    "sed -n -e 's/a/{n}/p' x", "sed -f {n} x", "sed --expression={n} x", "sed -ne {n} x", "git -c {n} status",
    "git -c alias.x={n} x", "git submodule foreach {n}", "git rebase -x {n}", "git clone -u {n} x",
    "git clone --upload-pack={n} x", "make X={n}", "make {n}", "make -f - <<< {n}", "tar cf x y --checkpoint-action={n}",
    "tar cf x --checkpoint=1 --checkpoint-action exec={n} y", "tar xf x -I {n}", "tar xf x --to-command={n}", "rsync -e {n} a b",
    "rsync --rsh={n} a b", "vim -c {n}", "vi +{n}", "gdb -ex {n}", "gdb -batch -ex {n}", "sqlite3 :memory: {n}",
    "sqlite3 x <<< {n}", "echo {n} | sqlite3", "m4 <<< {n}", "ed x <<< {n}", "env python3 -c {n}", "nice perl -e {n}",
    "find . -maxdepth 0 -exec perl -e {n} \\;", "xargs -n1 python3 -c {n} <<< x", "bash -c 'perl -e \"$1\"' _ {n}",
]

DISGUISES = [
    "\\eval {n}", 'ev""al {n}', "'eval' {n}", '"eval" {n}', "$'eval' {n}", '$"eval" {n}', "e\\val {n}", "e''val {n}",
    "ev\\\nal {n}", "e{{v,}}al {n}", "ev[a]l {n}", "ev?l {n}", "x=eval; $x {n}", 'x=eval; "$x" {n}', "x=eval; ${{x}} {n}",
    "x=ev; ${{x}}al {n}", "$(echo eval) {n}", "`echo eval` {n}", '"$(echo eval)" {n}', 'x=(eval); "${{x[@]}}" {n}',
    "x=al; ev$x {n}", "${{NONE:-eval}} {n}", 'ba""sh -c {n}', "/bin/b?sh -c {n}", "b{{a,}}sh -c {n}", "$SHELL -c {n}", "$0 {n}",
    '"$BASH" -c {n}', "bash '-c' {n}", 'bash -"c" {n}', "bash \\-c {n}", "bash $'-c' {n}", "$'\\145val' {n}", "\\. {n}",
    "\\trap {n} EXIT", "tr''ap {n} EXIT", 'e() {{ eval "$@"; }}; e {n}', 'function e {{ eval "$1"; }}; e {n}',
    "function e() {{ $1; }}; e {n}", "true && \\\neval {n}", "true;eval {n}", "true|eval {n}", "true&eval {n}", "{n}", "{n} x",
    "./{n}", "FOO=1 {n}", "FOO=1 eval {n}", "> x eval {n}", "< /dev/null eval {n}", "2>&1 eval {n}", "eval -- {n}",
    "eval '' {n}", 'f() {{ "$@"; }}; f eval {n}', "x='eval'; f() {{ $x \"$1\"; }}; f {n}", "echo $(eval {n})",
    'echo "$(eval {n})"', "echo `eval {n}`", 'echo "`eval {n}`"', "cat <(eval {n})", "x=$(eval {n})",
    "echo ${{NONE:-$(eval {n})}}", "echo $(( 1 + $(eval {n}) ))", "case $(eval {n}) in x) ;; esac",
    "for x in $(eval {n}); do true; done", "[[ $(eval {n}) == x ]]", "x=($(eval {n}))", 'if [ -n "$(eval {n})" ]; then true; fi',
    ": {n}; cat <<EOF\n$(eval \"$BATCHAI_PARAM_n\")\nEOF",
]

OPERANDS = [
    "env -u X {n}", "timeout -s KILL 5 {n}", "timeout 5 {n}", "sudo -u x {n}", "exec -a x {n}", "nice -n 5 {n}", "nohup {n}",
    "stdbuf -o L {n}", "chroot / {n}", "flock x -c {n}", '"{n}/run.sh" x', "{n}/run.sh x", 'python "{n}/x.py"', "python -m {n}",
    "bash $BATCHAI_PARAM_n/x.sh {n}", 'bash "$NONE" {n}', "bash $NONE {n}", "python -m pdb -c {n} x.py", 'true {n}; eval "$_"',
    'echo {n}; bash -c "$_"', "echo {n} | bash /dev/stdin", "echo {n} > f; source f", 'echo {n} > f; eval "$(cat f)"',
    "echo {n} | tee $(bash)", "echo {n} > f; tee $(date)$(bash f)", "echo {n} | tee f; . f", "echo {n} | while true; do bash; break; done", "echo {n} | for x do bash; done",
    "declare -i LR; LR={n} python t.py", "command declare -i LR; LR={n} python t.py", "python t.py $(eval {n})",
    'python t.py "$(bash -c {n})"', 'python t.py "$(echo {n} | bash)"', "&> f eval {n}", "bash < {n}", "sqlite3 x < {n}",
    'printf "-v" {n} x', "printf $NONE {n}", "[ {n} -eq 1 ]", "[ -n x -a -v {n} ]", "test -n x -o -v {n}", "export -n x={n}",
    "eval\\\n {n}", "bash -\\\nc {n}", "mpirun -np 2 'bash' -c {n}", "mpirun env -S {n}", "sudo env bash -c {n}",
    "command command eval {n}", "command comma\\nd eval {n}", "deno eval {n}", "alias y=eval; y {n}", "#x\neval {n}", "true #x\\\neval {n}",
    "echo a#b;eval {n}", "echo ''#b ;eval {n}", "echo \\# ;eval {n}", 'echo "\\"";eval {n}', "echo 'a\\';eval {n}",
    "true;#x'\neval {n} #'",
    "true >& {n}", "true >&1{n}", "true 2>&{n}", "true 2>&1{n}", "true;: >&1'{n}'", "true {n}; eval \"\\$_\"", "true {n}; bash -c '${{_}}'",
]

REFUSED = [*BUILTINS, *ARITHMETIC, *VARIABLES, *SHELLS, *PROGRAMS, *DISGUISES, *OPERANDS]

# Harmless, but it takes more than a look to know.
UNPLAIN = [
    "PYTHONPATH=src:{a} python -m pkg.mod --x {n}", "for f in {n}; do echo \"$f\"; done", "[[ {n} == x* ]] && echo y",
    "[[ -n {n} && {a} != z ]]", "[[ {n} =~ ^a+$ ]]", "set -- {n}; echo \"$1\"", "export DATA={n}; python t.py",
    "export A={n} B={a}", "DATA={n}; python t.py --data \"$DATA\"", "x={n}; y=\"$x/sub\"; mkdir -p \"$y\"",
    "python t.py {n} | grep loss | awk '{{print $2}}'", "awk -v x={n} '{{print x}}' f", "awk -F, '{{print $1}}' {n}",
    "sed -i 's/a/b/' {n}", "sed -n -e 's/a/b/p' {n}", "tar xzf {n} -C {a}", "git clone {n} {a}", "git checkout {n}",
    "find {n} -name '*.npz' -exec cp {{}} {a} \\;", "ls {n} | xargs -n1 python t.py", "xargs python t.py --x {n} < list",
    "timeout {a} python t.py {n}", "env FOO={n} python t.py", "\"$HOME/my tools/run\" {n}", "'my prog' {n}",
    "source activate {n} && python t.py", "bash -c 'echo \"$0\"' {n}", "bash -c 'cd sub && python t.py \"$@\"' _ {n} {a}",
    "bash -lc 'python t.py \"$1\"' _ {n}", "bash -o pipefail -c 'python t.py \"$1\" | tee log' _ {n}",
    "python -c 'import sys; print(sys.argv)' {n}", "perl -e 'print @ARGV' {n}", "R -e 'print(1)' --args {n}",
    "case {n} in a|b) echo x;; *) echo {a};; esac", "f() {{ python t.py \"$1\"; }}; f {n}",
    "args=(--x {n}); python t.py \"${{args[@]}}\"", "echo ${{NONE:-{n}}}", "out=$(python t.py {n}); echo \"$out\"",
    "diff <(python t.py {n}) x", "printf 'x={n}\\n'", "python t.py <<< {n}", "cat <<< {n} > x",
    "n=0; (( n += 1 )); python t.py {n} $n", "i=$(( 1 + 2 )); python t.py $i {n}",
    "if (( $(nproc) > 2 )); then python t.py {n}; fi", "python t.py --out \"${{OUT%/}}/{n}\"", "python {a} {n}",
    "curl -s https://x/i.sh | bash; python t.py {n}", "echo {n} | xargs bash -c 'echo \"$@\"' _",
    "for f in a b; do python t.py --f $f --x {n}; done", "for f in a b; do python t.py --f \"$f\" {n} || exit 1; done",
    "if [ -n {n} ]; then python t.py {n}; else python t.py; fi", "if [ {a} = train ]; then echo {n}; fi",
    "[ -d {a} ] || mkdir -p {a}", "test -f {n} && cat {n}", "[ ! -e {n} ]",
    "while read -r line; do python t.py \"$line\" {n}; done < list", "python t.py $(cat {n})", "printf '%s\\n' {n}",
    "(cd sub; python t.py {n})", "{{ python t.py {n}; }} > x", "for i in 1 2 3; do python t.py --i $i {n}; done",
    "[ ! -d {n} ] && mkdir {n}", "python a.py {n} | tee log\nfor i in 1 2; do python b.py $i {n}; done",
    "if [ {a} = train ]; then python t.py {n}; elif [ -z {n} ]; then exit 1; fi",
]

ACCEPTED = [
    "echo x > {n}", "echo x >> {n}", "echo x >| {n}", "echo x &> {n}", "echo x 2> {n}", "cat < {n}",
    "echo x &>> '{n}' 2>&1; ls", "python train.py --lr {n} --data {a}", "python3 -u train.py {n}",
    "horovodrun -np 2 -H localhost:2 python train.py --lr {n}", "mpirun -np {a} -x FOO={n} python train.py",
    "bash run.sh {n}", "bash -x run.sh --note \"{n}\"", "sh ./run.sh '{n}'",
    "torchrun --nproc_per_node={a} train.py --x={n}", "torchrun --nproc_per_node {a} train.py {n}",
    "accelerate launch --num_processes {a} t.py {n}", "PYTHONPATH=. python -m pkg {n}",
    "CUDA_VISIBLE_DEVICES={a} python t.py {n}", "cd sub && python t.py {n} > log.txt",
    "cd {a} && python t.py {n} 2>&1 | tee log.txt", "python t.py {n} > {a} 2>&1", "set -euo pipefail; python t.py {n}",
    "echo {n} | tee log", "echo {n} | python read.py", "echo {n} | python read.py -", "cat {n} | grep -c {a}",
    "grep -e {n} file", "unzip -o {n}", "curl -fsSL -o {a} {n}", "pip install -r req.txt && python t.py {n}",
    "cp -r {n} {a}", "time python t.py {n}", "timeout 60 python t.py {n}", "timeout --signal=KILL 1h python t.py {n}",
    "nice -n 5 python t.py {n}", "nohup python t.py {n} &", "env -u X FOO=1 python t.py {n}", "exec python t.py {n}",
    "stdbuf -oL python t.py {n}", "command python t.py {n}", "taskset -c 0-3 python t.py {n}",
    "numactl --interleave=all python t.py {n}", "python t.py --mode eval --x {n}", "python eval.py {n}",
    "python read.py --trap {n}", "./train.sh {n}", "/opt/bin/train {n}", "$AZ_BATCHAI_INPUT_CODE/run.sh {n}",
    "source venv/bin/activate && python t.py {n}", ". ./env.sh; python t.py {n}",
    "eval \"$(conda shell.bash hook)\" && conda activate x && python t.py {n}", "Rscript train.R {n}",
    "jupyter nbconvert --to notebook --execute {n}", "papermill in.ipynb out.ipynb -p x {n}", "mlflow run . -P x={n}",
    "spark-submit --master local[2] t.py {n}", "java -jar x.jar {n}", "node train.js {n}",
    "docker run img python t.py {n}", "python t.py {n} & wait", "! grep -q {n} x", "true && python t.py {n} || false",
    "python t.py {n} # don't `worry` (about) this", "python t.py \\\n  --x {n} \\\n  --y {a}",
    "trap 'rm -f x' EXIT; python t.py {n}", "ulimit -n 4096; python t.py {n}", "sudo mount x; python t.py {n}",
    "conda run -n {a} python t.py {n}", "uv run python t.py {n}", "poetry run python t.py {n}", "exit {n}",
    "python t.py\\\n  --x {n}", "python a.py {n}\npython b.py {a}\n", "# a comment, don't\npython t.py {n}",
    "python t.py \"{n}\" '{a}' --name=prefix-{n}", "LR={n} python t.py",
    "mkdir -p out && python t.py {n} 2>&1 | tee out/log", "sudo python t.py {n}", "timeout 60 torchrun t.py {n}",
    "nice ./train.sh {n}", "exec ./train.sh --x {n}", "~/run.sh {n}", "python \"$CODE/train.py\" {n}",
    "source venv/bin/activate && python t.py {n} | tee log", "export A=b; python t.py {n}",
    "A=$(nproc); python t.py $A {n}", "./train.py --mode batch {n}", "accelerate launch t.py {n}",
    "sed -i -e 's/a=no/a=yes/g' x; tar xzf y; python t.py {n}",
    "mpirun -mca btl_tcp_if_exclude docker0,lo --hostfile $AZ_BATCHAI_MPI_HOST_FILE python $AZ_BATCHAI_MOUNT_ROOT/x/train.py --steps 5 {n}",
    "python t.py {n} | tee log-$(hostname)", "echo {n} > log; python t.py --day $(date +%F)", "python t.py --re 'x\\{n}$' '${n}'",
    "cd /tmp; sudo git clone https://x/y.git; cd y; sudo /opt/bin/pip install . --x {n}",
]
# fmt: on


def rendered(template: str) -> str | None:
    """The shell line, None if it is refused."""
    try:
        return translate(template, variable_names(["n", "a"]), "MLproject: main")
    except ProjectError:
        return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the files that templates name, and programs that do nothing in place of Python and what a node may lack."""
    path = tmp_path_factory.mktemp("project")
    (path / "bin").mkdir()
    (path / "sub").mkdir()
    programs = (
        "python python3 horovodrun mpirun torchrun accelerate curl git pip conda uv poetry mlflow docker sudo jupyter papermill"
    )
    for name in [*programs.split(), "spark-submit", "java", "node", "Rscript", "R", "numactl", "unzip"]:
        (path / "bin" / name).write_text("#!/bin/sh\nexit 0\n", encoding="utf-8")
        (path / "bin" / name).chmod(0o755)
    for name in ("run.sh", "train.sh", "env.sh"):
        (path / name).write_text("#!/bin/sh\n", encoding="utf-8")
        (path / name).chmod(0o755)
    (path / "list").write_text("one\ntwo\n", encoding="utf-8")
    return path


def runs_a_value(line: str, folder: Path, values: list[str]) -> bool:
    """Whether a line, run as an agent does, once for each value, has made the mark."""
    environment = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "HOME": str(folder),
        "SHELL": "/bin/bash",
        "P": "text",
        "LINE": line,
    }
    driver = 'for value; do BATCHAI_PARAM_n=$value BATCHAI_PARAM_a=$value bash -c "$LINE"; done'
    argv = ["bash", "-c", driver, "_", *values]
    subprocess.run(argv, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    found = [mark for mark in (folder / "MARK", folder / "sub" / "MARK") if mark.exists()]
    for mark in found:
        mark.unlink()
    return bool(found)


@pytest.mark.parametrize("template", [*REFUSED, *UNPLAIN])
def test_what_evaluates_a_value_or_may_do_so_is_refused_with_a_sentence(template: str) -> None:
    with pytest.raises(ProjectError) as error:
        translate(template, variable_names(["n", "a"]), "MLproject: main")
    sentence = str(error.value)
    assert sentence.startswith("MLproject: main: command has the placeholder {") and "\n" not in sentence
    assert "BATCHAI_PARAM_" in sentence


def test_a_whole_number_may_stand_anywhere() -> None:
    for template in REFUSED:
        if "{a}" not in template:
            assert "1234" in translate(template, variable_names(["n"]), "MLproject", {"n": "1234"}), template


@pytest.mark.parametrize("template", ACCEPTED)
def test_what_only_passes_a_value_on_runs_none_of_it(template: str, folder: Path) -> None:
    line = translate(template, variable_names(["n", "a"]), "MLproject: main")
    assert not runs_a_value(line, folder, HOSTILE[:5]), line


def test_the_mark_is_made_by_a_line_that_evaluates(folder: Path) -> None:
    assert runs_a_value('eval "$BATCHAI_PARAM_n"', folder, HOSTILE[:5])


@given(st.sampled_from(ACCEPTED), st.lists(st.sampled_from(HOSTILE), min_size=1, max_size=3).map("".join))
@settings(
    max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_accepted_template_runs_any_value(folder: Path, template: str, value: str) -> None:
    line = rendered(template)
    assert line is not None and not runs_a_value(line, folder, [value])


WORDS = r"""
    eval sh -c -x echo printf -v test [ ] read export declare -i true cat {n} '{n}' "{n}" x={n} x= $x "$x"
    ${{x}} ${{!x}} ${{y[{n}]}} y[x]=1 x+=1 [[ ]] -eq 1 == ; | && <<< <( $( ) ( {{ }} ` ' " \ if then fi do done
    f $1 "$@" exec command env xargs trap EXIT
"""
PIECES = [*WORDS.split(), "bash -c", "$(( x ))", "(( x ))", "[[ x -eq 1 ]]", "for x in", "f() {{"]


@given(st.lists(st.sampled_from(PIECES), min_size=2, max_size=8), st.sampled_from([" ", "", "\n"]))
@settings(
    max_examples=1000,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_whatever_is_written_is_refused_or_runs_no_value(folder: Path, pieces: list[str], between: str) -> None:
    line = rendered(between.join(pieces)) if any("{n}" in piece for piece in pieces) else None
    assert line is None or not runs_a_value(line, folder, HOSTILE[:5]), line


REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("path", sorted(REPOSITORY.glob("[!.]*/**/MLproject")), ids=lambda path: path.parent.name)
def test_projects_of_this_repository_are_taken_as_text(path: Path) -> None:
    for entry in load_project(path.parent).entry_points.values():
        assert translate(entry.command, variable_names(entry.parameters), str(path))


def test_the_sentence_names_the_place_and_what_to_do() -> None:
    with pytest.raises(ProjectError) as error:
        translate("python t.py {a}; bash -c {n}", variable_names(["a", "n"]), "/p/MLproject: entry_points.main")
    sentence = str(error.value)
    assert sentence.startswith(
        "/p/MLproject: entry_points.main: command has the placeholder {n} in the words or the input of 'bash'"
    )
    assert "declare the parameter as int" in sentence and "the environment variable BATCHAI_PARAM_n" in sentence


@pytest.mark.parametrize("line", ["( " * 5000 + "{n}", "echo $(" * 5000 + "{n}", '"$(' * 5000 + "{n}"])
def test_brackets_without_end_get_a_sentence(line: str) -> None:
    with pytest.raises(ProjectError, match="more than plain commands"):
        translate(line, variable_names(["n"]), "MLproject")

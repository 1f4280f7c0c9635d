#!/usr/bin/env bash
# tools/packages.sh GROUP...: installs the packages of packages/debian.txt that are in these groups and missing here.
. "$(dirname "$0")/common.sh"
wanted=$(awk -v groups="$*" 'BEGIN { n = split(groups, g, " "); for (i = 1; i <= n; i++) want[g[i]] = 1 }
  { sub(/#.*/, "") } NF { m = split($2, mine, ","); for (i = 1; i <= m; i++) if (mine[i] in want) { print $1; break } }' packages/debian.txt)
if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  for tool in g++ cmake ninja; do
    command -v $tool >/dev/null || die "$tool is missing and this is not a Debian machine. Install the counterparts of:" $wanted
  done
  exit 0
fi
missing=$(comm -23 <(printf '%s\n' $wanted | sort) \
  <(dpkg-query -W -f='${db:Status-Status} ${Package}\n' $wanted 2>/dev/null | awk '$1 == "installed" { print $2 }' | sort -u))
[ -z "$missing" ] && exit 0
say "installing Debian packages:" $missing
log=$(mktemp)
tidy() { rm -f "$log"; }
trap tidy EXIT
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then  # tests start the daemons that they need; none is to run because it was installed
  tidy() { rm -f "$log"; as_root rm -f $policy; }
  printf '#!/bin/sh\nexit 101\n' | as_root tee $policy >/dev/null
  as_root chmod 755 $policy
fi
apt() { as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 "$@"; }
progress() {  # apt's status lines, "dlstatus:3:41.5:Retrieving..." and "pmstatus:g++:12.3:Unpacking...", for live()
  sed -unE -e 's/^dlstatus:[0-9]+:([0-9]+)[^:]*:.*/@\1 % fetched/p' -e 's/^pmstatus:([^:]*):([0-9]+)[^:]*:.*/@\2 % unpacking and setting up \1/p'
}
if ! { apt update >"$log" 2>&1 &&
  apt -o APT::Status-Fd=3 install --no-install-recommends $missing 3>&1 >>"$log" 2>&1 | progress | live "installing packages"; }; then
  tail -n 15 "$log" >&2
  die "apt-get failed (its last lines are above). Check the network and the disk, then repeat this command."
fi

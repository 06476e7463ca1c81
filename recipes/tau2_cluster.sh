#!/usr/bin/env bash
# What the tau2-bench recipes share: sourced by them after cluster.sh, does nothing by itself.
#
# Environment: DOMAIN (retail, airline or telecom), METHOD (exact: arXiv 2605.12070, or sao: arXiv 2607.07508), USER_URL
# and USER_MODEL (the OpenAI-compatible endpoint that plays the user), TAU2_PYTHON (another interpreter that has the
# benchmark; empty: this one).
set -euo pipefail

domain="${DOMAIN:-retail}"
method="${METHOD:-exact}"

tau2_flags() {  # sets tau2_config, and environment: domain, user and the size of its test split
  local tasks
  case "$domain" in
    airline) tasks=20 ;;
    retail | telecom) tasks=40 ;;
    *) fail "DOMAIN=$domain; known: retail, airline, telecom" ;;
  esac
  # shellcheck disable=SC2034  # the recipes read it
  case "$method" in
    exact) tau2_config=recipes/configs/qwen3_tau2.yaml ;;
    sao) tau2_config=recipes/configs/qwen3_tau2_sao.yaml ;;
    *) fail "METHOD=$method; known: exact, sao" ;;
  esac
  # shellcheck disable=SC2034  # the recipes read it
  environment=(
    --set "environment.options.domain=$domain"
    --set "environment.options.user.endpoint.url=${USER_URL:-http://host:port/v1}"
    --set "environment.options.user.endpoint.model=${USER_MODEL:-default}"
    --set "evaluation.tasks=$tasks"
  )
  [[ -z "${TAU2_PYTHON:-}" ]] || environment+=(--set "environment.options.python=$TAU2_PYTHON")
}

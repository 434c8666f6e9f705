{{- define "downbeat.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* What begins every name; a pod's name has to stay within 63 characters, as it is its host's. */}}
{{- define "downbeat.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "downbeat.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "downbeat.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels of pods that never change. (list ROOT ROLE POOL) */}}
{{- define "downbeat.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "downbeat.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
{{- with index . 1 }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with index . 2 }}
downbeat/pool: {{ . }}
{{- end }}
{{- end -}}

{{/* (list ROOT ROLE POOL) */}}
{{- define "downbeat.labels" -}}
{{- $root := index . 0 -}}
{{ include "downbeat.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "downbeat.secretName" -}}
{{- .Values.secret.existing | default (printf "%s-secret" (include "downbeat.fullname" .)) -}}
{{- end -}}

{{- define "downbeat.repository" -}}
{{- if .Values.models.volume -}}/models{{- else -}}/usr/share/downbeat/models{{- end -}}
{{- end -}}

{{/* The domain of schedulers' names, of which each is its pod's. */}}
{{- define "downbeat.schedulerDomain" -}}
{{- printf "%s-scheduler.%s.svc.%s" (include "downbeat.fullname" .) .Release.Namespace .Values.clusterDomain -}}
{{- end -}}

{{/* The list of schedulers, as every role has it, in JSON. */}}
{{- define "downbeat.schedulers" -}}
{{- $list := list -}}
{{- $name := include "downbeat.fullname" . -}}
{{- $domain := include "downbeat.schedulerDomain" . -}}
{{- range $number := until (int .Values.scheduler.replicas) -}}
{{- $list = printf "%s-scheduler-%d.%s:7400" $name $number $domain | append $list -}}
{{- end -}}
{{- $list | toJson -}}
{{- end -}}

{{/* Pools of backends, each with what holds for all and with what is its own, in JSON. */}}
{{- define "downbeat.pools" -}}
{{- $pools := dict -}}
{{- range $name, $own := .Values.backends -}}
{{- $_ := set $pools $name (mergeOverwrite (deepCopy $.Values.backend) ($own | default dict)) -}}
{{- end -}}
{{- $pools | toJson -}}
{{- end -}}

{{/* What a role's objects are called. (list ROOT ROLE POOL) */}}
{{- define "downbeat.roleName" -}}
{{- $name := printf "%s-%s" (include "downbeat.fullname" (index . 0)) (index . 1) -}}
{{- with index . 2 -}}{{- $name = printf "%s-%s" $name . -}}{{- end -}}
{{- $name -}}
{{- end -}}

{{/* The time that a role may take to end: what it sleeps, what it drains, and what it takes to close. */}}
{{- define "downbeat.graceSeconds" -}}
{{- $drain := .config.drain_timeout_ms | default 25000 | int64 -}}
{{- add .preStopSeconds (div (add $drain 999) 1000) 5 -}}
{{- end -}}

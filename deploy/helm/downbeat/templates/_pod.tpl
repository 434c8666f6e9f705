{{/* A role's file, in JSON: what the chart knows, and what its values say. (dict root, role, of) */}}
{{- define "downbeat.config" -}}
{{- $values := .root.Values -}}
{{- $config := dict
  "schedulers" (include "downbeat.schedulers" .root | fromJsonArray)
  "secret_file" (list "/etc/downbeat/secret/first" "/etc/downbeat/secret/second")
  "arm" $values.arm
  "admin" (dict "http" (printf "%s:8100" $values.bind)) -}}
{{- if eq .role "scheduler" -}}
{{- $_ := set $config "listen" (printf "${POD_NAME}.%s:7400" (include "downbeat.schedulerDomain" .root)) -}}
{{- else -}}
{{- $_ := set $config "repository" (include "downbeat.repository" .root) -}}
{{- $_ := set $config "address" (ternary "auto:4791" "auto" (eq $values.arm "soft")) -}}
{{- end -}}
{{- if $values.tls.secretName -}}
{{- $_ := set $config "tls" (dict
  "certificate" "/etc/downbeat/tls/tls.crt"
  "key" "/etc/downbeat/tls/tls.key"
  "authority" "/etc/downbeat/tls/ca.crt"
  "name" $values.tls.name) -}}
{{- end -}}
{{- if eq .role "frontend" -}}
{{- $_ := set $config "link" "auto:7401" -}}
{{- $_ := set $config "http" (printf "%s:8000" $values.bind) -}}
{{- $_ := set $config "grpc" (printf "%s:8001" $values.bind) -}}
{{- if .of.tls.secretName -}}
{{- $tls := dict "certificate" "/etc/downbeat/clients/tls.crt" "key" "/etc/downbeat/clients/tls.key" -}}
{{- if .of.tls.clients -}}{{- $_ := set $tls "authority" "/etc/downbeat/clients/ca.crt" -}}{{- end -}}
{{- $_ := set $config "clients" (dict "tls" $tls) -}}
{{- end -}}
{{- end -}}
{{- mergeOverwrite $config (deepCopy .of.config) | toJson -}}
{{- end -}}

{{/* A role's ConfigMap. (dict root, role, pool, name, of) */}}
{{- define "downbeat.configMap" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ .name }}
  labels: {{- include "downbeat.labels" (list .root .role .pool) | nindent 4 }}
data:
  {{ .role }}.toml: |
    {{- include "downbeat.toml" (include "downbeat.config" . | fromJson) | trim | nindent 4 }}
{{- end -}}

{{/* A role's pod template. (dict root, role, pool, name, of) */}}
{{- define "downbeat.pod" -}}
{{- $values := .root.Values -}}
{{- $isRdma := ne $values.arm "soft" -}}
{{- if and $isRdma (not $values.rdma.resource) -}}
{{- fail (printf "arm: found %q and no rdma.resource, expected what the device plugin offers" $values.arm) -}}
{{- else if and $values.rdma.resource (not $isRdma) -}}
{{- fail (printf "rdma.resource: found %q beside the arm `soft`, expected arm: verbs:auto" $values.rdma.resource) -}}
{{- end -}}
{{- $tag := .of.tag | default $values.image.tag | default .root.Chart.AppVersion -}}
{{- $isRoot := and $isRdma $values.rdma.ipcLock -}}
{{- $resources := deepCopy .of.resources -}}
{{- if $isRdma -}}
{{- $one := dict $values.rdma.resource 1 -}}
{{- $resources = mergeOverwrite $resources (dict "requests" $one "limits" (deepCopy $one)) -}}
{{- end -}}
metadata:
  labels:
    {{- include "downbeat.selector" (list .root .role .pool) | nindent 4 }}
    {{- with .of.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: {{ .role }}
    downbeat/config: {{ include "downbeat.config" . | sha256sum }}
    {{- with .of.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with .of.serviceAccountName }}
  serviceAccountName: {{ . | quote }}
  {{- end }}
  {{- with .of.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with .of.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  terminationGracePeriodSeconds: {{ include "downbeat.graceSeconds" .of }}
  securityContext:
    runAsNonRoot: {{ not $isRoot }}
    runAsUser: {{ ternary 0 65532 $isRoot }}
    runAsGroup: 65532
    fsGroup: 65532
    seccompProfile: {type: RuntimeDefault}
  containers:
    - name: {{ .role }}
      image: {{ printf "%s:%s" $values.image.repository $tag }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      args: [{{ .role }}, --config, /etc/downbeat/config/{{ .role }}.toml, --log-format, {{ $values.logFormat }}]
      env:
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - name: XDG_CACHE_HOME
          value: /var/cache/downbeat
        {{- with .of.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- if eq .role "scheduler" }}
        - {name: members, containerPort: 7400}
        {{- else if eq .role "frontend" }}
        - {name: http, containerPort: 8000}
        - {name: grpc, containerPort: 8001}
        - {name: link, containerPort: 7401}
        {{- end }}
        - {name: roce, containerPort: 4791, protocol: UDP}
        - {name: admin, containerPort: 8100}
      startupProbe:
        httpGet: {path: /livez, port: admin}
        periodSeconds: 1
        failureThreshold: 120
      livenessProbe:
        httpGet: {path: /livez, port: admin}
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: /readyz, port: admin}
        periodSeconds: 2
        timeoutSeconds: 3
        failureThreshold: 2
      {{- if gt (int .of.preStopSeconds) 0 }}
      lifecycle:
        preStop:
          sleep: {seconds: {{ .of.preStopSeconds }}}
      {{- end }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
          {{- if $isRoot }}
          add: [IPC_LOCK]
          {{- end }}
      resources: {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - {name: config, mountPath: /etc/downbeat/config, readOnly: true}
        - {name: secret, mountPath: /etc/downbeat/secret, readOnly: true}
        {{- if $values.tls.secretName }}
        - {name: tls, mountPath: /etc/downbeat/tls, readOnly: true}
        {{- end }}
        {{- if eq .role "frontend" }}
        {{- if .of.tls.secretName }}
        - {name: clients, mountPath: /etc/downbeat/clients, readOnly: true}
        {{- end }}
        {{- end }}
        - {name: tmp, mountPath: /tmp}
        {{- if ne .role "scheduler" }}
        - {name: cache, mountPath: /var/cache/downbeat}
        {{- if $values.models.volume }}
        - name: models
          mountPath: /models
          readOnly: true
          {{- with $values.models.subPath }}
          subPath: {{ . | quote }}
          {{- end }}
        {{- end }}
        {{- end }}
        {{- with .of.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: config
      configMap: {name: {{ .name }}}
    - name: secret
      secret: {secretName: {{ include "downbeat.secretName" .root }}, defaultMode: 0440}
    {{- with $values.tls.secretName }}
    - name: tls
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- if eq .role "frontend" }}
    {{- with .of.tls.secretName }}
    - name: clients
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- end }}
    - name: tmp
      emptyDir: {}
    {{- if ne .role "scheduler" }}
    - name: cache
      emptyDir: {}
    {{- with $values.models.volume }}
    - name: models
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- end }}
    {{- with .of.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels: {{- include "downbeat.selector" (list .root .role .pool) | nindent 10 }}
  {{- with .of.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .of.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .of.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* A role's PodDisruptionBudget. (dict root, role, pool, name, of) */}}
{{- define "downbeat.podDisruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels: {{- include "downbeat.labels" (list .root .role .pool) | nindent 4 }}
spec:
  maxUnavailable: {{ .of.podDisruptionBudget.maxUnavailable }}
  # What does not serve is in nobody's way.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "downbeat.selector" (list .root .role .pool) | nindent 6 }}
{{- end -}}

{{/* A role's HorizontalPodAutoscaler. (dict root, role, pool, name, of) */}}
{{- define "downbeat.autoscaler" -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ .name }}
  labels: {{- include "downbeat.labels" (list .root .role .pool) | nindent 4 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: Deployment
    name: {{ .name }}
  minReplicas: {{ .of.autoscaling.minReplicas }}
  maxReplicas: {{ .of.autoscaling.maxReplicas }}
  metrics:
    - type: Resource
      resource:
        name: cpu
        target: {type: Utilization, averageUtilization: {{ .of.autoscaling.targetCPUUtilizationPercentage }}}
  behavior:
    scaleDown:
      stabilizationWindowSeconds: 300
      policies:
        - {type: Pods, value: 1, periodSeconds: 60}
{{- end -}}
